"""Two backends for a step. From the same `StepInput`s both compute the same new values."""
