"""Initialisation rules, named after the papers they are from. Each sees one layer's 2-D kernel, never a stack.

A role says what a kernel is for: query, key, value, output (of attention), gate, up, down (of the feed-forward),
patches, pooler, or head (to logits). A table's role is tokens, positions, segments or relative.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array

from jformer.models.model_config import ModelConfig

Init = Callable[..., Array]
"""(key, shape, dtype) → array."""

FIXED_DEVIATION = ("bert", "gpt2")  # rules whose kernels have one deviation at every width
RESIDUAL_OUTPUTS = ("output", "down")
DEEPNORM_SCALED = ("value", "output", "gate", "up", "down")


def _gpt2(c: ModelConfig, role: str, layers: int) -> Init:
    return nn.initializers.normal(0.02 * ((2 * layers) ** -0.5 if role in RESIDUAL_OUTPUTS else 1.0))


def _vit(c: ModelConfig, role: str, layers: int) -> Init:
    rules = {"head": nn.initializers.zeros_init(), "patches": nn.initializers.lecun_normal()}
    return rules.get(role, nn.initializers.xavier_uniform())


KERNELS: dict[str, Callable[[ModelConfig, str, int], Init]] = {  # rule → (config, role, layers) → initializer
    "glorot": lambda c, role, layers: nn.initializers.xavier_uniform(),  # Glorot and Bengio 2010, uniform
    "he": lambda c, role, layers: nn.initializers.variance_scaling(2.0, "fan_in", "normal"),  # He et al. 2015
    "small": lambda c, role, layers: nn.initializers.normal((2 / (5 * c.d_model)) ** 0.5),  # Nguyen and Salazar 2019
    "bert": lambda c, role, layers: nn.initializers.truncated_normal(0.02),  # Devlin et al. 2019
    "gpt2": _gpt2,  # Radford et al. 2019: residual outputs smaller by 1/sqrt(2N)
    "t5": lambda c, role, layers: nn.initializers.variance_scaling(1.0, "fan_in", "normal"),  # Raffel et al. 2020
    "vit": _vit,  # Dosovitskiy et al. 2021: the classifier starts at zero
}

TABLES: dict[str, dict[str, float]] = {  # deviations; others have d_model^-0.5, with mup the base's
    "bert": {"tokens": 0.02, "positions": 0.02, "segments": 0.02},
    "gpt2": {"tokens": 0.02, "positions": 0.01},
    "t5": {"tokens": 1.0},
    "vit": {"positions": 0.02},
}


def kernel_init(config: ModelConfig, role: str, layers: int = 1, beta: float = 1.0) -> Init:
    """Return the initializer of a kernel float32 [in out] in a stack of `layers`.

    With attention_scale 'one', the queries' kernel includes the 1/sqrt(k) that attention omits. `beta` is DeepNorm's
    (Wang et al. 2022) and shrinks what the paper shrinks. With mup, deviations scale as width^-0.5 under every rule,
    and the projection to logits starts at zero (Yang et al. 2022, appendix D.2).
    """
    if config.parametrization == "mup" and role == "head":
        return nn.initializers.zeros_init()
    gain = config.key_size**-0.5 if role == "query" and config.attention_scale == "one" else 1.0
    gain *= beta if role in DEEPNORM_SCALED else 1.0
    gain *= config.mup_width_ratio**-0.5 if config.init in FIXED_DEVIATION else 1.0
    draw = KERNELS[config.init](config, role, layers)
    return lambda key, shape, dtype=jnp.float32: gain * draw(key, shape, dtype)


def table_init(config: ModelConfig, role: str) -> Init:
    """Return the initializer of a table float32 [rows d]: normal, truncated at two deviations if kernels are."""
    draw = nn.initializers.truncated_normal if config.init == "bert" else nn.initializers.normal
    return draw(TABLES.get(config.init, {}).get(role, config.scale_width**-0.5))


def bias_init(config: ModelConfig, role: str) -> nn.initializers.Initializer:
    """Return the initializer of a bias: zeros, except in the feed-forward of ViT."""
    tiny = config.init == "vit" and role in ("up", "down")
    return nn.initializers.normal(1e-6) if tiny else nn.initializers.zeros_init()


def deepnorm(config: ModelConfig, decoder: bool) -> tuple[float, float]:
    """Return alpha, the factor of the residual, and beta, the gain of initial kernels (Wang et al. 2022, Figure 2)."""
    if config.norm != "deepnorm":
        return 1.0, 1.0
    n, m = config.num_layers, config.decoder_layers
    if config.family != "encdec":
        return (2 * n) ** 0.25, (8 * n) ** -0.25
    if decoder:
        return (3 * m) ** 0.25, (12 * m) ** -0.25
    return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
