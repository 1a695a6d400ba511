"""How probable models find given targets: one forced pass gives log-probabilities and attention. No text here.

Letters in shapes: b rows of a batch, t target positions, s source positions, d d_model, v entries of the vocabulary.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jformer.inference.compiled_searches import KEPT
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.parallel.activations import constrain_sharding
from jformer.parallel.backend import target
from jformer.parallel.sharding import over_rows

Scorer = Callable[[Sequence[PyTree], Mapping[str, np.ndarray]], dict[str, Array]]
TOKENS = 1_024  # projected to the vocabulary at a time: logits of a whole batch would be its largest array by far


def make_scorer(
    models: Sequence[Model], average: str, mesh: Mesh | None = None, attend: bool = False, tokens: int = TOKENS
) -> Scorer:
    """Return the compiled (parameters of each model, batch) → {"log_probs": f32 [b t], "attention": f32 [b t s]}.

    The batch has both sides as in training. A token's log-probability is given all before it, over the whole
    vocabulary; several models decide together, as they do in a search. Who asks for an equal one again gets the same.

    Args:
        models: an ensemble.
        average: whether the mean is of their probabilities or of their log-probabilities.
        mesh: over whose data and fsdp the rows are split.
        attend: whether to tell what the decoder's last layer attends to in the source when it predicts a token, the
            mean of heads and models.
        tokens: how many are projected to the vocabulary at a time.
    """
    return _make_scorer(tuple(models), average, mesh, attend, tokens, target())


@functools.lru_cache(KEPT)
def _make_scorer(
    models: tuple[Model, ...], average: str, mesh: Mesh | None, attend: bool, tokens: int, platform: str
) -> Scorer:
    def score(params: Sequence[PyTree], batch: Batch) -> dict[str, Array]:
        passes = [_forced(model, tree, batch, attend) for model, tree in zip(models, params, strict=True)]
        hidden = [states for states, _ in passes]

        def row(one: tuple[list[Float[Array, "t d"]], Int[Array, " t"]]) -> Float[Array, " t"]:
            states, targets = one
            each = [_log_probs(*member) for member in zip(models, params, states, strict=True)]
            return jnp.take_along_axis(_mean(each, average), targets[:, None], axis=-1)[:, 0]

        log_probs = jax.lax.map(row, (hidden, batch["target_out"]), batch_size=max(1, tokens // hidden[0].shape[1]))
        scores = {"log_probs": jnp.where(batch["weights"] > 0, log_probs, 0.0)}
        if attend:
            scores["attention"] = jnp.mean(jnp.stack([weights for _, weights in passes]), axis=0)
        return scores

    return jax.jit(over_rows(score, mesh))


def _forced(model: Any, params: PyTree, batch: Batch, attend: bool) -> tuple[Float[Array, "b t d"], Any]:
    """Return the hidden states, and f32 [b t s], the weights of the last layer's attention to the source, or None."""
    if not attend:
        return model.apply({"params": params}, batch, method="hidden"), None
    hidden, seen = watched_pass(model, params, batch)
    return hidden, model.cross_weights(seen)


def watched_pass(model: Model, params: PyTree, batch: Batch) -> tuple[Float[Array, "b t d"], PyTree]:
    """Return the hidden states of given targets, and what a model shows on the way, the weights of its attention."""
    hidden, seen = model.apply({"params": params}, batch, method="hidden", mutable=["intermediates"])
    return hidden, seen.get("intermediates", {})


def _log_probs(model: Model, params: PyTree, hidden: Float[Array, "t d"]) -> Float[Array, "t v"]:
    logits = model.apply({"params": params}, hidden[None], method="logits")[0]
    return jax.nn.log_softmax(
        constrain_sharding(logits.astype(jnp.float32))
    )  # whole on every device, to gather targets from


def _mean(each: Sequence[Float[Array, "t _"]], average: str) -> Float[Array, "t v"]:
    """Return the logarithm of the mean probability, or the mean of log-probabilities made to sum to one again.

    Some models may have rows past the vocabulary; no target is among them.
    """
    rows = jnp.stack([log_probs[:, : min(one.shape[1] for one in each)] for log_probs in each])
    if average == "probability":
        return jax.nn.logsumexp(rows, axis=0) - jnp.log(float(len(each)))
    return jax.nn.log_softmax(rows.mean(axis=0))
