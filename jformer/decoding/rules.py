"""Which tokens may come next: rules that forbid or penalise tokens, independent of the search.

Axes: b sentences, v vocabulary, h tokens of history, p of a prefix or prompt, k results; rows = b·n beams.

A rule acts on the log-probabilities of the whole vocabulary. A forbidden token gets -inf and the others keep their
values: nothing is renormalised, so the score of an output is the one that the model gives the same tokens. Three rules
change that on request: the repetition penalty, which never raises a log-probability, a forced end, which costs nothing,
and `renormalize`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Masking takes a pass over the vocabulary; up to this many tokens (usually padding, BOS and the unknown token) are
# removed after top-k instead. Not tuned.
MAX_EXCLUDED = 4
CHUNK = 80  # tokens a chunk: 40 to 128 took about as long on CPU at a vocabulary of 10,000


class Rules(NamedTuple):
    """The symbols and the rules of a search; the defaults forbid nothing but padding."""

    eos: int  # the symbol that ends a hypothesis
    pad: int  # the padding symbol, which is never written
    allowed: Bool[np.ndarray, " v"] | None = None  # the tokens that may be written; None = all but padding
    min_length: int = 0  # no end symbol before this many tokens
    no_repeat_ngram: int = 0  # no n-gram of this size twice in a hypothesis; 0 = off (Paulus et al. 2018, 2.5)
    repetition_penalty: float = 1.0  # at least 1; times the log-probability of earlier tokens (Keskar et al. 2019)
    prefix: Int[Array, "b p"] | None = None  # how every hypothesis begins, regardless of the other rules
    prefix_length: Int[Array, " b"] | None = None
    prompt: Int[Array, "b p"] | None = None  # the tokens before the search: they count for repetition only
    prompt_length: Int[Array, " b"] | None = None
    of_text: bool = False  # the prompt is a text: an end symbol in front (the BOS of GPT-2) is not part of it
    last: Int[Array, " b"] | None = None  # the index of the token that must be the end symbol, at no cost; None = none
    renormalize: bool = False  # after the other rules: the probabilities of the allowed tokens sum to 1

    @property
    def read_history(self) -> bool:
        """Whether a rule depends on the tokens so far."""
        return self.no_repeat_ngram > 0 or self.repetition_penalty != 1


def initial_history(rules: Rules, sentences: int, beams: int, room: int) -> Int[Array, "rows h"] | None:
    """Return the tokens before a search of `room` steps, newest last after padding; None if no rule reads them.

    In a text that is continued, no end symbol counts as written, not even that of the source in prefix_lm. Elsewhere,
    one counts only if it is the first token.

    >>> rules = Rules(eos=2, pad=0, no_repeat_ngram=2, prompt=jnp.array([[7, 8, 0]]), prompt_length=jnp.array([2]))
    >>> initial_history(rules, sentences=1, beams=2, room=3).tolist()
    [[0, 0, 0, 0, 7, 8], [0, 0, 0, 0, 7, 8]]
    """
    if not rules.read_history:
        return None
    history = jnp.full((sentences, max(room, rules.no_repeat_ngram)), rules.pad, jnp.int32)
    if rules.prompt is not None and rules.prompt_length is not None:
        width = rules.prompt.shape[1]
        indices = jnp.arange(width) - width + rules.prompt_length[:, None]  # [b p], negative where padding goes
        prompt = jnp.take_along_axis(rules.prompt, jnp.maximum(indices, 0), axis=1)
        is_end = (prompt == rules.eos) & ((indices > 0) | rules.of_text)
        prompt = jnp.where((indices >= 0) & ~is_end, prompt, rules.pad)
        history = jnp.concatenate([history, prompt], axis=1)
    return jnp.repeat(history, beams, axis=0)  # [b h] → [rows h]


def append_token(history: Int[Array, "rows h"] | None, tokens: Int[Array, " rows"]) -> Int[Array, "rows h"] | None:
    """Append one token to the history of every row; the oldest one is dropped.

    >>> append_token(jnp.array([[0, 7, 8]]), jnp.array([9])).tolist()
    [[7, 8, 9]]
    """
    return None if history is None else jnp.concatenate([history[:, 1:], tokens[:, None]], axis=1)


class LogProbs(NamedTuple):
    """The log-probabilities of every next token, -inf for a forbidden one, computed on demand.

    A search reads few of them, and every pass over a whole vocabulary takes time. So `top_k` normalises only what it
    returns, and drops always-forbidden tokens afterwards.
    """

    scores: Float[Array, "rows v"]  # logits, or log-probabilities
    log_total: Float[Array, "rows 1"] | None = None  # their normaliser; None = logsumexp
    excluded: tuple[int, ...] = ()  # tokens that are forbidden although `scores` has them

    def top_k(self, k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
        """Return the k largest log-probabilities of every row, largest first, and their tokens.

        >>> probs = jnp.array([[0.5, 0.3, 0.2]])
        >>> values, tokens = LogProbs(jnp.log(probs), excluded=(0,)).top_k(1)
        >>> tokens.item(), round(jnp.exp(values).item(), 3)
        (1, 0.3)
        """
        values, tokens = top_k(self.scores, min(k + len(self.excluded), self.scores.shape[1]))
        log_total = self.log_total
        best = values.max(axis=1, keepdims=True)  # not values[:, :1], for which XLA sorts the whole vocabulary
        if log_total is None:
            log_total = best + jnp.log(jnp.exp(self.scores - best).sum(1, keepdims=True))
        if self.excluded:
            values = jnp.where(jnp.isin(tokens, np.array(self.excluded)), -jnp.inf, values)
            values, order = lax.top_k(values, k)
            tokens = jnp.take_along_axis(tokens, order, axis=1)
        return values - log_total, tokens

    def dense(self) -> Float[Array, "rows v"]:
        """Return the log-probabilities of all tokens."""
        included = ~np.isin(np.arange(self.scores.shape[1]), self.excluded)
        log_total = self.log_total
        if log_total is None:
            log_total = jax.nn.logsumexp(self.scores, axis=1, keepdims=True)
        return jnp.where(included, self.scores - log_total, -jnp.inf)


def next_log_probs(
    rules: Rules, logits: Float[Array, "rows v"], history: Int[Array, "rows h"] | None, index: Int[Array, ""]
) -> LogProbs:
    """Return the log-probabilities under the rules of token number `index` (from 0) of every row.

    A prefix overrules everything else while it lasts.

    >>> logits = jnp.log(jnp.array([[0.1, 0.2, 0.4, 0.3]]))
    >>> rules = Rules(eos=2, pad=0, min_length=1)  # not the end symbol first
    >>> log_probs = next_log_probs(rules, logits, history=None, index=jnp.int32(0))
    >>> print(np.exp(log_probs.dense()).round(2))
    [[0.  0.2 0.  0.3]]
    """
    tokens = np.arange(logits.shape[1])
    is_pad = tokens == rules.pad
    forbidden = is_pad if rules.allowed is None else ~rules.allowed | is_pad
    is_plain = history is None and rules.prefix is None and rules.last is None
    if is_plain and not rules.min_length and not rules.renormalize and forbidden.sum() <= MAX_EXCLUDED:
        return LogProbs(logits, excluded=tuple(np.flatnonzero(forbidden).tolist()))

    logits -= jax.nn.logsumexp(logits, axis=1, keepdims=True)
    too_early = (tokens == rules.eos) & (index < rules.min_length)
    log_probs = jnp.where(forbidden | too_early, -jnp.inf, logits)
    if history is not None and rules.repetition_penalty != 1:
        log_probs = _penalize_repetition(log_probs, history, rules.repetition_penalty)
    if history is not None and rules.no_repeat_ngram:
        log_probs = _forbid_ngrams(log_probs, history, rules.no_repeat_ngram, rules.pad)
    if rules.last is not None:
        is_last = jnp.repeat(index >= rules.last, logits.shape[0] // rules.last.shape[0])  # [b] → [rows]
        only_end = jnp.where(tokens == rules.eos, 0.0, -jnp.inf)
        log_probs = jnp.where(is_last[:, None], only_end, log_probs)
    if rules.renormalize:
        log_total = jax.nn.logsumexp(log_probs, axis=1, keepdims=True)
        log_probs -= jnp.where(log_total > -jnp.inf, log_total, 0.0)  # rules may forbid all tokens of a row
    if rules.prefix is not None and rules.prefix_length is not None:
        beams = logits.shape[0] // rules.prefix.shape[0]
        forced = jnp.take(rules.prefix, index, axis=1, mode="clip")  # [b p] → [b]
        forced = jnp.repeat(forced, beams)  # → [rows]
        only_forced = jnp.where(tokens == forced[:, None], logits, -jnp.inf)
        in_prefix = jnp.repeat(index < rules.prefix_length, beams)  # [b] → [rows]
        log_probs = jnp.where(in_prefix[:, None], only_forced, log_probs)
    return LogProbs(log_probs, log_total=jnp.zeros((logits.shape[0], 1)))


def _penalize_repetition(
    log_probs: Float[Array, "rows v"], history: Int[Array, "rows h"], penalty: float
) -> Float[Array, "rows v"]:
    """Multiply the log-probabilities of tokens in the history, once however often they occur there (hence `min`)."""
    rows = jnp.arange(log_probs.shape[0])[:, None]
    return log_probs.at[rows, history].min(penalty * log_probs[rows, history])


def _forbid_ngrams(
    log_probs: Float[Array, "rows v"], history: Int[Array, "rows h"], n: int, pad: int
) -> Float[Array, "rows v"]:
    """Forbid every token that would repeat an n-gram: those that once followed the last n - 1 tokens.

    Padding repeats nothing: it stands before the first token, and in place of end symbols that do not count.
    """
    ngrams = history.shape[1] - n + 1  # in the history
    same = jnp.ones((history.shape[0], ngrams), bool)  # [rows ngrams], whether it begins with the last n - 1 tokens
    for i in range(n - 1):
        last = history[:, i - n + 1]
        same &= (history[:, i : i + ngrams] == last[:, None]) & (last != pad)[:, None]
    followers = jnp.where(same, history[:, n - 1 :], pad)  # [rows ngrams]
    rows = jnp.arange(log_probs.shape[0])[:, None]
    return log_probs.at[rows, followers].set(-jnp.inf)


def top_k(scores: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return the k largest scores of every row, largest first, and their tokens; ties are in order of tokens.

    The k largest scores are in the k chunks with the largest maxima, because k scores beat every other chunk. So only
    the tokens of those chunks are ranked. The chunks stay in order, so that ties do.

    >>> values, tokens = top_k(jnp.array([[0.1, 0.4, 0.3, 0.4]]), 3)
    >>> tokens.tolist()
    [[1, 3, 2]]
    """
    rank = functools.partial(lax.top_k, k=k)
    if scores.shape[1] <= k * _chunk_size(scores.shape[1]):
        values, tokens = rank(scores)
    else:  # XLA:GPU has one kernel for it; chunks take eight, with three sorts
        chunked = functools.partial(_top_k_of_chunks, k=k)
        values, tokens = lax.platform_dependent(scores, cuda=rank, rocm=rank, default=chunked)
    return values, tokens


def _top_k_of_chunks(scores: Float[Array, "rows v"], k: int) -> list[Array]:
    rows, vocabulary = scores.shape
    size = _chunk_size(vocabulary)
    chunks = lax.top_k(_chunk_maxima(scores), k)[1]  # [rows c] → [rows k]
    chunks = jnp.sort(chunks)
    tokens = chunks[:, :, None] * size + jnp.arange(size)  # [rows k size]
    tokens = tokens.reshape(rows, -1)  # → [rows k·size]
    values = jnp.take_along_axis(scores, tokens, axis=-1, mode="fill", fill_value=-jnp.inf)
    values, order = lax.top_k(values, k)
    return [values, jnp.take_along_axis(tokens, order, axis=-1)]


def _chunk_maxima(scores: Float[Array, "rows v"]) -> Float[Array, "rows c"]:
    """Return the largest score of every chunk of tokens."""
    rows, vocabulary = scores.shape
    size = _chunk_size(vocabulary)
    if vocabulary % size == 0:
        return scores.reshape(rows, -1, size).max(axis=2)  # on CPU twice as fast as a window
    padding = (0, -vocabulary % size)
    return lax.reduce_window(scores, -jnp.inf, lax.max, (1, size), (1, size), ((0, 0), padding))


def _chunk_size(vocabulary: int) -> int:
    """Return a size that divides the vocabulary, if one of 80 to 159 does."""
    return next((size for size in range(CHUNK, 2 * CHUNK) if vocabulary % size == 0), CHUNK)
