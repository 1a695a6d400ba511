"""How a recurrent decoder attends to the source: the scores of Bahdanau et al. 2015 and Luong et al. 2015.

    additive  v · tanh(W s + U m)    Bahdanau et al. 2015, equation 6; s is the state before the step
    dot       s · m                  Luong et al. 2015, equation 8; s is the state after the step, here and below
    general   s · W m
    concat    v · tanh(W s + U m), which is v · tanh(W' [s; m])

Letters: b rows (the beams of m sentences side by side), s source positions, d features of the decoder's state, e of the
encoder's output, a of the products that are compared.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jformer.models.layers.linear import Dense


class RecurrentAttention(nn.Module):
    """Scores of source positions, and the mean of their vectors, weighted by the scores."""

    score: str
    features: int  # a

    def setup(self) -> None:
        """Make the parameters of the score."""
        init = nn.initializers.xavier_uniform()
        if self.score != "dot":
            self.memory = Dense(self.features, init, use_bias=False)
        if self.score in ("additive", "concat"):
            self.query = Dense(self.features, init, use_bias=False)
            self.vector = Dense(1, init, use_bias=False)

    def keys(self, memory: Float[Array, "m s e"]) -> Float[Array, "m s a"]:
        """Project the source, once for all steps."""
        return memory if self.score == "dot" else self.memory(memory)

    def __call__(
        self,
        query: Float[Array, "b d"],
        keys: Float[Array, "m s a"],
        values: Float[Array, "m s e"],
        mask: Bool[Array, "m s"],
    ) -> tuple[Float[Array, "b e"], Float[Array, "b s"]]:
        """Return the context of every row and its weights; softmax in float32, over the positions in the mask."""
        rows, sentences = query.shape[0], keys.shape[0]
        query = query.reshape(sentences, rows // sentences, -1)  # [b d] → [m n d]
        if self.score in ("additive", "concat"):
            compared = jnp.tanh(self.query(query)[:, :, None] + keys[:, None])  # [m n s a]
            scores = self.vector(compared)[..., 0]
        else:
            scores = jnp.einsum("mna,msa->mns", query, keys)
        scores = jnp.where(mask[:, None], scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores)
        context = jnp.einsum("mns,mse->mne", weights.astype(values.dtype), values)
        return context.reshape(rows, -1), weights.reshape(rows, -1)
