"""jformer: encoder-decoder Transformers in JAX and Flax Linen, from a laptop to a TPU pod."""

from pathlib import Path
from typing import Any


def load(workdir: str | Path) -> Any:
    """Return the Predictor of a trained run: `jformer.load(DIR).predict(texts)`."""
    from jformer.predict import load  # only now: reading a config needs no jax

    return load(workdir)
