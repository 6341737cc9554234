"""Speech as training data: texts, synthesis, recordings, features, batches."""
