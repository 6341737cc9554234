"""Training a Whisper: settings, model, optimizers, the loop, checkpoints and evaluation."""
