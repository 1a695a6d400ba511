"""What models think of given targets: one forced pass, and from it log-probabilities and alignments. No text here."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jformer.models import build_model
from jformer.placement import place
from jformer.sharding import over_rows

TOKENS = 1_024  # projected to the vocabulary at a time: logits of a whole batch would be its largest array by far


def make_scorer(models: Sequence[Any], average: str, mesh: Mesh | None = None, align: bool = False) -> Any:
    """Return the compiled (parameters of each model, batch) → {"log_probs": f32 [b t], "alignment": i32 [b t]}.

    The batch has both sides as in training. A token's log-probability is given all before it, over the whole
    vocabulary; several models decide together, by the mean of their probabilities or of their log-probabilities, as
    they do in a search. With `align`, a token's alignment is the source position that the heads of the decoder's last
    layer look at most on average, when they are about to say the token. On a mesh, rows are split over data and fsdp.
    """
    models = [_showing(model) for model in models] if align else models

    def score(params: Sequence[Any], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        passes = [_forced(model, tree, batch, align) for model, tree in zip(models, params, strict=True)]
        hidden = [states for states, _ in passes]

        def row(one: tuple[list[Float[Array, "t d"]], Int[Array, "t"]]) -> Float[Array, "t"]:
            states, targets = one
            each = [_log_probs(*member) for member in zip(models, params, states, strict=True)]
            return jnp.take_along_axis(_mean(each, average), targets[:, None], axis=-1)[:, 0]

        found = jax.lax.map(row, (hidden, batch["target_out"]), batch_size=max(1, TOKENS // hidden[0].shape[1]))
        scores = {"log_probs": jnp.where(batch["weights"] > 0, found, 0.0)}
        if align:
            scores["alignment"] = jnp.argmax(sum(weights for _, weights in passes), axis=-1).astype(jnp.int32)
        return scores

    return jax.jit(over_rows(score, mesh))


def _forced(model: Any, params: Any, batch: dict[str, jax.Array], align: bool) -> tuple[Float[Array, "b t d"], Any]:
    """Return the hidden states, and f32 [b t s], the weights of the last layer's attention to the source, or None."""
    if not align:
        return model.apply({"params": params}, batch, method="hidden"), None
    hidden, seen = model.apply({"params": params}, batch, method="hidden", mutable=["intermediates"])
    (weights,) = seen["intermediates"]["decoder"]["block"]["cross_attn"]["weights"]  # [l b h t s]
    return hidden, weights[-1].mean(axis=1)


def _log_probs(model: Any, params: Any, hidden: Float[Array, "t d"]) -> Float[Array, "t v"]:
    logits = model.apply({"params": params}, hidden[None], method="logits")[0]
    return jax.nn.log_softmax(place(logits.astype(jnp.float32)))  # whole, to look targets up


def _mean(each: Sequence[Float[Array, "t _"]], average: str) -> Float[Array, "t v"]:
    """Return the logarithm of the mean probability, or the mean of log-probabilities made to sum to one again.

    Some models may have rows past the vocabulary; no target is among them.
    """
    rows = jnp.stack([log_probs[:, : min(one.shape[1] for one in each)] for log_probs in each])
    if average == "probability":
        return jax.nn.logsumexp(rows, axis=0) - jnp.log(float(len(each)))
    return jax.nn.log_softmax(rows.mean(axis=0))


def _showing(model: Any) -> Any:
    """Return the model with the attention that shows its weights, whatever the machine: the one that can drop them.

    Nothing is dropped where no noise is given.
    """
    return build_model(dataclasses.replace(model.config, attention_dropout=model.config.attention_dropout or 0.1))
