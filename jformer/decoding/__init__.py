"""Search over any step function with a cache. Nothing in this room knows a model."""
