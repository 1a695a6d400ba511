"""Text in, batches of token arrays out. Numpy only: nothing in this room imports jax."""
