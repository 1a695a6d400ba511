"""What may be written next: rules that forbid tokens, or discount them, whatever search asks. No search here.

A rule acts on the log-probabilities of the whole vocabulary. A token that it forbids gets -inf and the others keep
what they have: nothing is normalised again, so a score is what the model gives when it is asked to score the same
tokens. Only the repetition penalty changes what a token counts; it never raises it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.tokens import best_tokens, chunk_maxima

FEW = 64  # columns that are written one by one


class Rules(NamedTuple):
    """The rules of a search; the defaults forbid nothing. Padding and a second `first` token are for `allowed`."""

    allowed: Bool[np.ndarray, "v"] | None = None  # the tokens that may be written; None = all but padding
    min_length: int = 0  # no end symbol before so many tokens
    no_repeat_ngram: int = 0  # no run of so many tokens twice in a hypothesis; 0 = off (Paulus et al. 2018, 2.5)
    repetition_penalty: float = 1.0  # at least 1; times the log-probability of tokens said before (Keskar et al. 2019)
    prefix: Int[Array, "b p"] | None = None  # how every hypothesis begins, over every other rule
    prefix_length: Int[Array, "b"] | None = None
    prompt: Int[Array, "b q"] | None = None  # what was said before the search: counts for repetition alone
    prompt_length: Int[Array, "b"] | None = None

    @property
    def read_history(self) -> bool:
        """Whether what was said before matters."""
        return self.no_repeat_ngram > 0 or self.repetition_penalty != 1


def start_history(rules: Rules, sentences: int, beams: int, length: int, pad: int) -> Int[Array, "rows h"] | None:
    """Return what was said before a search of `length` tokens, newest last after padding; None if no rule reads it."""
    if not rules.read_history:
        return None
    history = jnp.full((sentences, max(length, rules.no_repeat_ngram)), pad, jnp.int32)
    if rules.prompt is not None and rules.prompt_length is not None:
        width = rules.prompt.shape[1]
        places = jnp.arange(width) - width + rules.prompt_length[:, None]
        prompt = jnp.take_along_axis(rules.prompt, jnp.maximum(places, 0), axis=1)
        history = jnp.concatenate([history, jnp.where(places >= 0, prompt, pad)], axis=1)
    return jnp.repeat(history, beams, axis=0)


def say(history: Int[Array, "rows h"] | None, tokens: Int[Array, "rows"]) -> Int[Array, "rows h"] | None:
    """Add one token to what every row has said; the oldest place is forgotten."""
    return None if history is None else jnp.concatenate([history[:, 1:], tokens[:, None]], axis=1)


class Weighed(NamedTuple):
    """What every token counts as the next one: `scores` less `total` is its log-probability, -inf if it is forbidden.

    The two are kept apart because only a few tokens are ever looked at, and a pass over all of them is what costs.
    """

    scores: Float[Array, "rows v"]
    total: Float[Array, "rows 1"]

    def best(self, k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
        """Return the k largest log-probabilities of every row, largest first, and their tokens."""
        values, tokens = best_tokens(self.scores, k)
        return values - self.total, tokens

    def all(self) -> Float[Array, "rows v"]:
        """Return the log-probabilities of all tokens."""
        return self.scores - self.total


def weigh(
    rules: Rules,
    logits: Float[Array, "rows v"],
    history: Int[Array, "rows h"] | None,
    now: Int[Array, ""],
    eos: int,
    pad: int,
) -> Weighed:
    """Return what each token counts as the one at place `now` of its row.

    Rows are sentences × beams. Padding is always forbidden. A forced prefix overrules all else while it lasts.
    """
    scores, total = _allow(rules, logits, now, eos, pad)
    if history is not None and rules.repetition_penalty != 1:
        scores, logits = _discount(scores - total, history, rules.repetition_penalty), logits - total
        total = jnp.zeros_like(total)
    if history is not None and rules.no_repeat_ngram:
        scores = _forbid_repeats(scores, history, rules.no_repeat_ngram, pad)
    if rules.prefix is None or rules.prefix_length is None:
        return Weighed(scores, total)
    beams = logits.shape[0] // rules.prefix.shape[0]
    forced = jnp.repeat(jnp.take(rules.prefix, now, axis=1, mode="clip"), beams)
    asked = jnp.where(jnp.arange(logits.shape[1]) == forced[:, None], logits, -jnp.inf)
    return Weighed(jnp.where(jnp.repeat(now < rules.prefix_length, beams)[:, None], asked, scores), total)


def _allow(
    rules: Rules, logits: Float[Array, "rows v"], now: Int[Array, ""], eos: int, pad: int
) -> tuple[Float[Array, "rows v"], Float[Array, "rows 1"]]:
    """Return the logits, -inf where always forbidden or ending too early, and the logarithm of the sum of all of them.

    A few columns are put to -inf in place and added to the sum apart, to spare passes over the whole vocabulary.
    """
    vocabulary = logits.shape[1]
    allowed = np.ones(vocabulary, bool) if rules.allowed is None else rules.allowed
    forbidden = np.flatnonzero(~allowed | (np.arange(vocabulary) == pad))
    early = jnp.arange(vocabulary) == eos
    if len(forbidden) > FEW:
        total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        mask = ~allowed | (np.arange(vocabulary) == pad)
        return jnp.where(mask | (early & (now < rules.min_length)), -jnp.inf, logits), total
    apart = logits[:, forbidden]
    scores = logits.at[:, forbidden].set(-jnp.inf)
    top = jnp.maximum(chunk_maxima(scores).max(axis=1, keepdims=True), apart.max(axis=1, keepdims=True))
    sums = (jnp.exp(x - top).sum(axis=1, keepdims=True) for x in (scores, apart))
    total = top + jnp.log(sum(sums))
    return jnp.where(early & (now < rules.min_length), -jnp.inf, scores) if rules.min_length else scores, total


def _discount(
    log_probs: Float[Array, "rows v"], history: Int[Array, "rows h"], penalty: float
) -> Float[Array, "rows v"]:
    """Multiply the log-probabilities of tokens said before, once however often they were said (hence `min`)."""
    rows = jnp.arange(log_probs.shape[0])[:, None]
    return log_probs.at[rows, history].min(penalty * log_probs[rows, history])


def _forbid_repeats(
    log_probs: Float[Array, "rows v"], history: Int[Array, "rows h"], n: int, pad: int
) -> Float[Array, "rows v"]:
    """Forbid what followed wherever the last n - 1 tokens stood before.

    The padding before the first token does no harm: only padding is ever forbidden for its sake.
    """
    runs = history.shape[1] - n + 1  # of n tokens in the history
    same = jnp.ones((history.shape[0], runs), bool)
    for i in range(n - 1):
        same &= history[:, i : i + runs] == history[:, i - n + 1][:, None]
    followers = jnp.where(same, history[:, n - 1 :], pad)
    return log_probs.at[jnp.arange(log_probs.shape[0])[:, None], followers].set(-jnp.inf)
