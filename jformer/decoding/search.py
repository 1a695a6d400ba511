"""What every search has in common: a step function over a cache, its inputs and results, and its loop.

Axes: b sentences, n hypotheses of a sentence, v vocabulary, t tokens, k continuations of a hypothesis; rows = b·n, the
hypotheses of a sentence side by side.

`position` and every leaf of `self` in a cache have one entry a row, and follow the row's hypothesis. Everything else in
it belongs to a sentence and is shared by its rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

Cache = dict[str, PyTree]  # {'position': i32[rows], 'self': pytree of [rows …], and what belongs to sentences}
Step = Callable[[Cache, Int[Array, " rows"]], tuple[Float[Array, "rows v"], Cache]]
FOLLOW_BEAMS = ("position", "self")


class Start(NamedTuple):
    """Where a search begins and how far it may go.

    A sentence whose limit exceeds `room` may be left unfinished, and so may the last `max_unfinished` sentences, which
    would hold up all others.
    """

    token: Int[Array, " b"]  # the token to continue from, not in the cache yet: BOS, or the last of a prompt
    limits: Int[Array, " b"]  # the most tokens to choose for each sentence; 0 for a row that only fills the batch
    room: int  # the most tokens to choose for any sentence; the cache has room for them
    max_unfinished: int | Int[Array, ""] = 0

    def goes_on(self, state: PyTree) -> Bool[Array, ""]:
        """Return whether there is room for a token, and enough sentences are unfinished."""
        return (state.cur_index < self.room) & ((~state.done).sum() > self.max_unfinished)


class Decoded(NamedTuple):
    """The n hypotheses of every sentence: best first from a search, samples in the order of their keys.

    A hypothesis without the end symbol was cut at its sentence's limit. A slot that no hypothesis fills has length 0
    and score -inf; the slots of a sentence whose logits were not finite have length 0 and score nan.
    """

    tokens: Int[Array, "b n t"]  # the end symbol included, padding after it
    scores: Float[Array, "b n"]  # summed log-probabilities, divided by the length penalty if the search has one
    lengths: Int[Array, "b n"]  # tokens, the end symbol included
    done: Bool[Array, " b"]  # False: the search ran out of room before it was done


class SearchLoop(NamedTuple):
    """A search as the arguments of `lax.while_loop`, and functions that read its state. For use inside jit.

    A state has `cur_index`, of the token to choose next, and `done`: which sentences (or rows) no step changes.
    """

    init: PyTree  # the state before the first token
    cond: Callable[[PyTree], Bool[Array, ""]]  # whether anything is left to do
    body: Callable[[PyTree], PyTree]  # appends one token
    result: Callable[[PyTree], Decoded]  # the result so far; final for sentences that are `done`
    stable_prefix: Callable[[PyTree], tuple[Int[Array, "b t"], Int[Array, " b"]]]
    """The tokens that every sentence's best output is certain to begin with, and how many there are."""
    traced: Callable[[PyTree], tuple[PyTree, PyTree]] | None = None
    """Of a beam: `body`, which also returns the Trace of its step."""

    def run(self) -> Decoded:
        """Search to the end."""
        return self.result(lax.while_loop(self.cond, self.body, self.init))

    def record(self, room: int) -> "tuple[Decoded, Trace]":
        """Search to the end like `run`, and also return the candidates and choices of each of `room` steps."""
        assert self.traced
        traced = self.traced

        def body(both: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            state, trace = both
            after, of_step = traced(state)
            return after, jax.tree.map(lambda every, one: every.at[:, state.cur_index].set(one), trace, of_step)

        of_step = jax.eval_shape(lambda state: traced(state)[1], self.init)
        trace = jax.tree.map(lambda x: jnp.zeros((x.shape[0], room, *x.shape[1:]), x.dtype), of_step)
        state, trace = lax.while_loop(lambda both: self.cond(both[0]), body, (self.init, trace))
        return self.result(state), trace

    def advance(self, state: PyTree, steps: Int[Array, ""]) -> PyTree:
        """Run `steps` further steps from a state, or until the end: the same steps as in `run`."""
        until = state.cur_index + steps
        return lax.while_loop(lambda at: self.cond(at) & (at.cur_index < until), self.body, state)


class Trace(NamedTuple):
    """The candidates and choices of a beam search: those of one step, or of all steps in order.

    Summed log-probabilities and scores are -inf in an empty slot.
    """

    searched: Bool[Array, " b *t"]  # False: the sentence was done before this step; the rest is undefined
    tokens: Int[Array, "b *t n k"]  # the candidates: continuations of the n hypotheses that were live
    sums: Float[Array, "b *t n k"]  # their summed log-probabilities
    live_sums: Float[Array, "b *t n"]  # of the next live hypotheses, one in each beam
    live_tokens: Int[Array, "b *t n"]
    live_parents: Int[Array, "b *t n"]  # the beam that a token was appended to
    end_parents: Int[Array, "b *t n"]  # of those that ended in this step
    end_scores: Float[Array, "b *t n"]  # with the penalties of length and coverage


def reorder(cache: Cache, beams: Int[Array, "b n"]) -> Cache:
    """Give every row the cache of another beam of its sentence.

    >>> cache = {"position": jnp.array([5, 6, 7, 8]), "self": {}, "memory": "of sentences"}
    >>> reorder(cache, jnp.array([[1, 1], [0, 1]]))["position"].tolist()
    [6, 6, 7, 8]
    """
    sentences, beam_size = beams.shape
    offsets = jnp.arange(sentences)[:, None] * beam_size  # [b 1], of each sentence's rows
    rows = (offsets + beams).reshape(-1)  # [b n] → [rows]
    return _map_rows(cache, lambda leaf: leaf[rows])


def repeat_rows(cache: Cache, beam_size: int) -> Cache:
    """Turn a cache with one row a sentence into one with `beam_size` equal rows a sentence.

    >>> repeat_rows({"position": jnp.array([5, 7]), "self": {}}, 2)["position"].tolist()
    [5, 5, 7, 7]
    """
    return _map_rows(cache, lambda leaf: jnp.repeat(leaf, beam_size, axis=0))


def _map_rows(cache: Cache, function: Callable[[Array], Array]) -> Cache:
    return {**cache, **jax.tree.map(function, {key: cache[key] for key in FOLLOW_BEAMS})}
