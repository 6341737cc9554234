"""Step times of optimizers on the shapes of Whisper models: `maxfactor bench`."""
