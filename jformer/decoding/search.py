"""What every search is given and what it returns. No search here.

Axes: b sentences, n hypotheses of a sentence, t tokens, k continuations of a hypothesis.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Start(NamedTuple):
    """Where a search begins and how far it may go.

    A sentence whose limit is above `room` may be left unfinished; so may the last `max_unfinished` sentences, for which
    all others would have to wait.
    """

    token: Int[Array, " b"]  # the one to go on from, which the cache does not hold yet: BOS, or the last of a prompt
    limits: Int[Array, " b"]  # the most tokens to choose for each sentence; 0 for a row that only fills the batch
    room: int  # the most tokens to choose for any sentence; the cache has room for them
    max_unfinished: int | Int[Array, ""] = 0


class Decoded(NamedTuple):
    """The n hypotheses of every sentence: of a search best first, of samples in the order of their keys.

    A hypothesis without the end symbol was cut at its sentence's limit. A slot that no hypothesis fills has length 0
    and score -inf; the slots of a sentence whose logits were not finite have length 0 and score nan.
    """

    tokens: Int[Array, "b n t"]  # the end symbol included, padding after it
    scores: Float[Array, "b n"]  # summed log-probabilities, divided by the length penalty if the search has one
    lengths: Int[Array, "b n"]  # tokens, the end symbol included
    done: Bool[Array, " b"]  # False: the search had no more room, and would have gone on


class Trace(NamedTuple):
    """What a beam search weighed and chose: of one step as it is made, or of all of them, step after step.

    Summed log-probabilities and scores are -inf in an empty slot.
    """

    searched: Bool[Array, " b *t"]  # False: the sentence was done before this step, and nothing else here is of it
    tokens: Int[Array, "b *t n k"]  # every continuation that was weighed, of the n hypotheses that were live
    sums: Float[Array, "b *t n k"]  # their summed log-probabilities
    live_sums: Float[Array, "b *t n"]  # of those that go on, one in each beam
    live_tokens: Int[Array, "b *t n"]
    live_parents: Int[Array, "b *t n"]  # the beam that a token was appended to
    end_parents: Int[Array, "b *t n"]  # of those that ended in this step
    end_scores: Float[Array, "b *t n"]  # with the penalties of length and coverage
