"""The feed-forward sublayer and its activations, plain and gated.

Axes: b rows, t positions, d d_model, f d_ff.
"""

from collections.abc import Callable

import flax.linen as nn
from jaxtyping import Array, Float

from jformer import plugins
from jformer.models.layers.dropout import DropoutKey, Site, dropout
from jformer.models.layers.initializers import bias_init, kernel_init
from jformer.models.layers.layer_scan import recomputed
from jformer.models.layers.linear import Dense
from jformer.models.model_config import ModelConfig
from jformer.parallel.activations import COLUMN, ROW
from jformer.parallel.backend import target

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),  # Hendrycks and Gimpel 2016
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),  # the same paper's approximation, as GPT-2 has it
    "silu": nn.silu,  # Elfwing et al. 2018; Ramachandran et al. 2017 call it swish
}
GATES: dict[str, Callable[[Array], Array]] = {
    "glu": nn.sigmoid,  # Dauphin et al. 2017
    "reglu": nn.relu,  # Shazeer 2020
    "geglu": ACTIVATIONS["gelu"],  # Shazeer 2020
    "geglu_tanh": ACTIVATIONS["gelu_tanh"],
    "swiglu": nn.silu,  # Shazeer 2020
}


def activation_of(config: ModelConfig) -> Callable[[Array], Array]:
    """Return the elementwise activation, or that of the gate, that a config names: built-in or user-defined."""
    found: Callable[[Array], Array] = plugins.find("model.activation", config.activation, {**GATES, **ACTIVATIONS})
    return found


class FeedForward(nn.Module):
    """Two projections with a nonlinearity between them (Vaswani et al. 2017, equation 2), gated or not."""

    config: ModelConfig
    layers: int = 1  # of the stack, and DeepNorm's beta: for the initial kernels
    beta: float = 1.0

    def setup(self) -> None:
        """Make d → f → d, and the gate's d → f."""
        c = self.config
        self.up = self.projection(c.d_ff, "up", COLUMN)
        if c.activation in GATES:
            self.gate = self.projection(c.d_ff, "gate", COLUMN)
        self.down = self.projection(c.d_model, "down", ROW)

    def projection(self, size: int, role: str, split: str) -> Dense:
        """Build one projection."""
        c = self.config
        return Dense(size, kernel_init(c, role, self.layers, self.beta), c.bias, bias_init(c, role), split)

    def __call__(self, x: Float[Array, "b t d"], dropout_key: DropoutKey | None = None) -> Float[Array, "b t d"]:
        """Map each position independently."""
        hidden = (self.gate(x), self.up(x)) if self.config.activation in GATES else (self.up(x),)
        finish = FeedForward._finish
        if target().platform == "tpu" and self.config.activation != "relu":  # recompute what `down` multiplies, too
            finish = nn.remat(finish, prevent_cse=False)
        return finish(self, hidden, dropout_key)

    def _finish(
        self, hidden: tuple[Float[Array, "b t f"], ...], dropout_key: DropoutKey | None
    ) -> Float[Array, "b t d"]:
        c = self.config
        nonlinearity = activation_of(c)
        if c.activation in GATES:
            y = recomputed(lambda gate, up: nonlinearity(gate) * up)(*hidden)
        elif c.activation == "relu":  # for its gradient the sign is enough
            y = nonlinearity(*hidden)
        else:
            y = recomputed(nonlinearity)(*hidden)
        y = dropout(y, c.activation_dropout, dropout_key, Site.ACTIVATION)
        return self.down(y)
