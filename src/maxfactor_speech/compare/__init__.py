"""Several optimizers trained on the same data, and a report about them."""
