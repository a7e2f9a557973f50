"""Training steps in which a GPU waits for Python: layers compiled on their own, and what a Trainer does beside them."""
