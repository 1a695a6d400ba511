"""Where a token stands: position encodings added to embeddings."""

import numpy as np


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """Return the table float32 [length d_model] of Vaswani et al. 2017, section 3.5.

    Feature 2i of position p is sin(p / 10000^(2i / d_model)), feature 2i + 1 its cosine: sines and cosines
    alternate, unlike implementations that put all sines first.
    """
    rates = 10_000.0 ** (-np.arange(0, d_model, 2) / d_model)
    angles = np.arange(length)[:, None] * rates
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(length, d_model).astype(np.float32)
