"""jformer: encoder-decoder Transformers in JAX and Flax Linen, from a laptop to a TPU pod."""
