"""The tags of a sentence as one chain: a linear-chain conditional random field (Lafferty et al. 2001, section 3).

A model gives `pairs`, the score of each state of a word after each state of the word before it; in taggers these are
the logits of the word's tag plus a table of transitions (Huang et al. 2015; Lample et al. 2016, section 2.2). The score
of a path, a state for every word, is the sum of its pairs, and its probability exp(score) / Z, Z summed over all paths.

States are the tags, and a last state outside sentences: before the first word and after the last one. Only the first
tokens of words and of sentences are steps; other positions and padding do not change the state. So sentences that share
a row are separate chains.

Letters in shapes: b rows, s positions, w states.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.models.batch import Batch
from jformer.tasks.losses import Project
from jformer.tasks.sums import Sum, Sums

NEVER = -1e30  # the score of an impossible state: log(0), but finite, so that differences are not nan


class Tags(NamedTuple):
    """The best tags of every row; values where no word begins are undefined."""

    tags: Int[Array, "b s"]
    shares: Float[Array, "b s"]  # marginal log-probability of a word's tag
    follows: Float[Array, "b s"]  # log-probability of the tag given that of the word before
    log_probs: Float[Array, " b"]  # log-probability of the whole sequence


def chain_loss(hidden: Float[Array, "b s d"], project: Project, batch: Batch) -> Sums:
    """Return `loss` and `nll` of whole sentences, and `correct`, the words whose tag is on the best path.

    All are normalized per word, as without a CRF.
    """
    pairs = project(hidden)
    allowed, outside = allowed_states(batch, pairs.shape[-1]), pairs.shape[-1] - 1
    right = jnp.where(batch["weights"] > 0, batch["target_out"], outside)
    wanted = allowed & (jnp.arange(outside + 1) == right[..., None])
    nll = (log_partition(pairs, allowed) - log_partition(pairs, wanted)).sum()
    correct = ((best_path(pairs, allowed)[0] == right) * batch["weights"]).sum()
    words = batch["weights"].sum()
    return {"loss": Sum(nll, words), "nll": Sum(nll, words), "correct": Sum(correct, words)}


def allowed_states(batch: Batch, states: int) -> Bool[Array, "b s w"]:
    """Return the states allowed at a position: tags at a word, "outside" where a sentence begins, else none.

    A position without allowed states is skipped. The beginning of a sentence ends the one before.
    """
    is_tag = jnp.arange(states) < states - 1
    begins = (batch["source_positions"] == 0) & (batch["source_segments"] > 0)  # [b s]
    return jnp.where(batch["weights"][..., None] > 0, is_tag, ~is_tag & begins[..., None])


def log_partition(pairs: Float[Array, "b s w w"], allowed: Bool[Array, "b s w"]) -> Float[Array, " b"]:
    """Return log Z over the allowed paths from outside to outside; for a single path, its score."""

    def step(before: Array, position: tuple[Array, Array]) -> tuple[Array, None]:
        pairs, allowed = position
        return _advance(before, jax.nn.logsumexp(before[:, :, None] + pairs, axis=1), allowed), None

    last, _ = lax.scan(step, _outside(pairs), (pairs.swapaxes(0, 1), allowed.swapaxes(0, 1)))
    return jax.nn.logsumexp(last + pairs[:, -1, :, -1], axis=1)


def best_path(pairs: Float[Array, "b s w w"], allowed: Bool[Array, "b s w"]) -> tuple[Int[Array, "b s"], Array]:
    """Return the path with the largest score (Viterbi 1967), and that score [b].

    Positions that are skipped keep the state of the last step.
    """

    def step(before: Array, position: tuple[Array, Array]) -> tuple[Array, Array]:
        pairs, allowed = position
        scores = before[:, :, None] + pairs  # [b w w]
        came_from = jnp.where(allowed.any(axis=1, keepdims=True), scores.argmax(axis=1), jnp.arange(scores.shape[-1]))
        return _advance(before, scores.max(axis=1), allowed), came_from

    def back(state: Array, came_from: Array) -> tuple[Array, Array]:
        return jnp.take_along_axis(came_from, state[:, None], axis=1)[:, 0], state

    last, came_from = lax.scan(step, _outside(pairs), (pairs.swapaxes(0, 1), allowed.swapaxes(0, 1)))
    ends = last + pairs[:, -1, :, -1]
    _, path = lax.scan(back, ends.argmax(axis=1), came_from, reverse=True)
    return path.swapaxes(0, 1), ends.max(axis=1)


def best_tags(pairs: Float[Array, "b s w w"], batch: Batch) -> Tags:
    """Return the likeliest tags and how probable they are."""
    allowed = allowed_states(batch, pairs.shape[-1])
    path, score = best_path(pairs, allowed)
    through = pair_shares(pairs, allowed)
    before = jnp.pad(path, ((0, 0), (1, 0)), constant_values=pairs.shape[-1] - 1)[:, :-1]
    share = jnp.take_along_axis(through.sum(axis=2), path[..., None], axis=2)[..., 0]
    after = jnp.take_along_axis(through, before[..., None, None], axis=2)[:, :, 0]  # [b s w w] → [b s w]
    follows = jnp.take_along_axis(after, path[..., None], axis=2)[..., 0] / after[..., :-1].sum(axis=2).clip(1e-30)
    return Tags(path, jnp.log(share), jnp.log(follows), score - log_partition(pairs, allowed))


def pair_shares(pairs: Float[Array, "b s w w"], allowed: Bool[Array, "b s w"]) -> Float[Array, "b s w w"]:
    """Return the marginal probability of each pair of consecutive states; summed over the first, that of a word's tag.

    It is the gradient of log Z: backpropagation is the backward half of forward-backward (Eisner 2016).
    """
    return jax.grad(lambda scores: log_partition(scores, allowed).sum())(pairs)


def _outside(pairs: Array) -> Float[Array, "b w"]:
    return jnp.full((pairs.shape[0], pairs.shape[-1]), NEVER).at[:, -1].set(0.0)


def _advance(before: Float[Array, "b w"], after: Float[Array, "b w"], allowed: Bool[Array, "b w"]) -> Array:
    """Return the scores after a position; a skipped position keeps those before it."""
    return jnp.where(allowed.any(axis=1, keepdims=True), jnp.where(allowed, after, NEVER), before)
