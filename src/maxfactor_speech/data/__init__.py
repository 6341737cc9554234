"""Speech as training data: texts, synthesis, recordings, features, tokens and batches."""
