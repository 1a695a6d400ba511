"""What may be written next: rules that forbid tokens, or discount them, whatever search asks. No search here.

A rule acts on the log-probabilities of the whole vocabulary. A token that it forbids gets -inf and the others keep
what they have: nothing is normalised again, so a score is what the model gives when it is asked to score the same
tokens. Only the repetition penalty changes what a token counts; it never raises it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jformer.decoding.tokens import best_tokens

FEW = 4  # forbidden tokens that are passed over one by one


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

    Only a few tokens are ever looked at, and passes over a whole vocabulary are what costs. So a few that are always
    forbidden are left in the scores and passed over by who looks, and the total waits for the best score.
    """

    scores: Float[Array, "rows v"]
    total: Float[Array, "rows 1"] | None = None  # None: the logarithm of the sum over all scores
    barred: tuple[int, ...] = ()

    def best(self, k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
        """Return the k largest log-probabilities of every row, largest first, and their tokens."""
        values, tokens = best_tokens(self.scores, min(k + len(self.barred), self.scores.shape[1]))
        top = values.max(axis=1, keepdims=True)  # not values[:, :1], for which XLA sorts instead
        total = top + jnp.log(jnp.exp(self.scores - top).sum(1, keepdims=True)) if self.total is None else self.total
        if self.barred:
            values, order = lax.top_k(jnp.where(jnp.isin(tokens, np.array(self.barred)), -jnp.inf, values), k)
            tokens = jnp.take_along_axis(tokens, order, axis=1)
        return values - total, tokens

    def all(self) -> Float[Array, "rows v"]:
        """Return the log-probabilities of all tokens."""
        allowed = ~np.isin(np.arange(self.scores.shape[1]), self.barred)
        total = jax.nn.logsumexp(self.scores, axis=1, keepdims=True) if self.total is None else self.total
        return jnp.where(allowed, self.scores - total, -jnp.inf)


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
    tokens = np.arange(logits.shape[1])
    forbidden = (tokens == pad) if rules.allowed is None else ~rules.allowed | (tokens == pad)
    if history is None and rules.prefix is None and not rules.min_length and forbidden.sum() <= FEW:
        return Weighed(logits, barred=tuple(np.flatnonzero(forbidden).tolist()))
    logits -= jax.nn.logsumexp(logits, axis=1, keepdims=True)
    scores = jnp.where(forbidden | ((tokens == eos) & (now < rules.min_length)), -jnp.inf, logits)
    if history is not None and rules.repetition_penalty != 1:
        scores = _discount(scores, history, rules.repetition_penalty)
    if history is not None and rules.no_repeat_ngram:
        scores = _forbid_repeats(scores, history, rules.no_repeat_ngram, pad)
    if rules.prefix is not None and rules.prefix_length is not None:
        beams = logits.shape[0] // rules.prefix.shape[0]
        forced = jnp.repeat(jnp.take(rules.prefix, now, axis=1, mode="clip"), beams)
        asked = jnp.where(tokens == forced[:, None], logits, -jnp.inf)
        scores = jnp.where(jnp.repeat(now < rules.prefix_length, beams)[:, None], asked, scores)
    return Weighed(scores, total=jnp.zeros((logits.shape[0], 1)))


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
