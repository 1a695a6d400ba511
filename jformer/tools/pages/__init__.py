"""Pages of one file: what a run attends to, what it did, and the pictures in them."""
