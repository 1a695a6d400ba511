"""What a model is trained to do: each task is a value."""
