"""Step times of optimizers on the shapes of real models: `maxfactor bench`."""
