"""The inputs and results of every search, and its loop: run to the end, or some steps at a time.

Axes: b sentences, n hypotheses of a sentence, t tokens, k continuations of a hypothesis.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree


class Start(NamedTuple):
    """Where a search begins and how far it may go.

    A sentence whose limit is above `room` may be left unfinished; so may the last `max_unfinished` sentences, for which
    all others would have to wait.
    """

    token: Int[Array, " b"]  # the one to go on from, which the cache does not hold yet: BOS, or the last of a prompt
    limits: Int[Array, " b"]  # the most tokens to choose for each sentence; 0 for a row that only fills the batch
    room: int  # the most tokens to choose for any sentence; the cache has room for them
    max_unfinished: int | Int[Array, ""] = 0

    def goes_on(self, state: PyTree) -> Bool[Array, ""]:
        """Return whether there is room for a token, and enough sentences are not done."""
        return (state.cur_index < self.room) & ((~state.done).sum() > self.max_unfinished)


class Decoded(NamedTuple):
    """The n hypotheses of every sentence: of a search best first, of samples in the order of their keys.

    A hypothesis without the end symbol was cut at its sentence's limit. A slot that no hypothesis fills has length 0
    and score -inf; the slots of a sentence whose logits were not finite have length 0 and score nan.
    """

    tokens: Int[Array, "b n t"]  # the end symbol included, padding after it
    scores: Float[Array, "b n"]  # summed log-probabilities, divided by the length penalty if the search has one
    lengths: Int[Array, "b n"]  # tokens, the end symbol included
    done: Bool[Array, " b"]  # False: the search had no more room, and would have gone on


class SearchLoop(NamedTuple):
    """A search as what `lax.while_loop` takes, and what can be read from a state of it. For use inside jit.

    A state has `cur_index`, of the token to choose next, and `done`: which sentences (or rows) no step changes.
    """

    init: PyTree  # the state before the first token
    cond: Callable[[PyTree], Bool[Array, ""]]  # whether there is something left to do
    body: Callable[[PyTree], PyTree]  # appends one token
    result: Callable[[PyTree], Decoded]  # the result so far; final for sentences that are `done`
    stable_prefix: Callable[[PyTree], tuple[Int[Array, "b t"], Int[Array, " b"]]]
    """The tokens that the best hypothesis of every sentence begins with, however the search goes on, and how many."""

    def run(self) -> Decoded:
        """Search to the end."""
        return self.result(lax.while_loop(self.cond, self.body, self.init))

    def advance(self, state: PyTree, steps: Int[Array, ""]) -> PyTree:
        """Run `steps` further steps from a state, or until the end: the same steps as in `run`."""
        until = state.cur_index + steps
        return lax.while_loop(lambda at: self.cond(at) & (at.cur_index < until), self.body, state)


class Trace(NamedTuple):
    """The candidates of a beam search and its choice: of one step, or of all of them, step after step.

    Summed log-probabilities and scores are -inf in an empty slot.
    """

    searched: Bool[Array, " b *t"]  # False: the sentence was done before this step, and nothing else here is of it
    tokens: Int[Array, "b *t n k"]  # the candidates: continuations of the n hypotheses that were live
    sums: Float[Array, "b *t n k"]  # their summed log-probabilities
    live_sums: Float[Array, "b *t n"]  # of those that go on, one in each beam
    live_tokens: Int[Array, "b *t n"]
    live_parents: Int[Array, "b *t n"]  # the beam that a token was appended to
    end_parents: Int[Array, "b *t n"]  # of those that ended in this step
    end_scores: Float[Array, "b *t n"]  # with the penalties of length and coverage
