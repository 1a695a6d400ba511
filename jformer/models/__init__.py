"""Pure Flax Linen modules. Nothing in this room imports data, optax, orbax or ml_collections."""
