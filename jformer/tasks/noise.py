"""Vectorized noise over the token ids of many texts: masks, sentinels and infilled spans.

Every function is pure: its effect on a text depends only on the text and its key. Noise symbols are the vocabulary's
own, or else ids past it, starting at `vocab_size`. The length of a noised sequence is determined by the number of
tokens (masks, sentinels) or bounded by it (infilling), so batches can be planned without drawing noise.
"""

from collections.abc import Callable

import numpy as np

from jformer.data.corpus import Tokens
from jformer.data.draws import ranges
from jformer.data.pipeline import Rows
from jformer.data.tokenizers import NUM_SYMBOLS, Symbols, Tokenizer
from jformer.errors import UserError
from jformer.tasks.features import OURS, chosen
from jformer.tasks.keyed_draws import choose, divide, integers, make_keys, other_keys, poisson, uniform

Noise = Callable[[Tokens, np.ndarray], tuple[Tokens, Tokens]]
"""(texts, their keys) → two sequences for each text, such as a noised source and its target."""
MASK, SENTINEL = "<mask>", "<extra_id_{}>"  # as in BART and T5: how ids of noise past the vocabulary are spelled
SURPLUS = 32  # draws of span lengths beyond twice the covered tokens: too few with a probability of exp(-32)


def noised(tokens: Tokens, rows: Rows, noise: Noise, seed: tuple[int, int]) -> tuple[Tokens, Tokens, Rows]:
    """Return both results of the noise for the examples of a batch, and rows that index these results.

    An example's noise depends only on (seed, step, row number, segment), not on the rest of the batch.
    """
    first, second = noise(chosen(tokens, rows), make_keys(seed, rows.numbers, rows.segments))
    return first, second, rows._replace(examples=np.arange(len(rows.examples)))


def mask_tokens(
    texts: Tokens, keys: np.ndarray, *, density: float, vocab_size: int, symbols: Symbols = OURS
) -> tuple[Tokens, Tokens]:
    """Return the texts with some tokens corrupted, and a boolean mask of these (Devlin et al. 2019, section 3.1).

    Of the chosen tokens 80 % become the mask, 10 % a random ordinary token, and 10 % are unchanged.

    Args:
        texts: with BOS and EOS, which are never chosen.
        keys: the random key of each text.
        density: share of a text's other tokens that is chosen; at least one is.
        vocab_size: ids that random tokens are drawn from; without `symbols.noise`, the mask follows after them.
        symbols: BOS, EOS, and the mask of an imported vocabulary.
    """
    ids = texts.values.astype(np.int32)
    candidates = np.flatnonzero((ids != symbols.bos) & (ids != symbols.eos))
    sizes = np.bincount(_owners(texts.lengths)[candidates], minlength=len(keys))
    counts = np.where(sizes > 0, np.maximum(np.rint(density * sizes), 1), 0).astype(np.int64)
    picked = candidates[choose(keys, sizes, counts)]
    draws = uniform(other_keys(keys, 1), counts)
    random = integers(other_keys(keys, 2), counts, 0 if symbols.noise else NUM_SYMBOLS, vocab_size)
    mask = noise_ids(symbols, vocab_size, 1)[0]
    chosen = np.zeros(len(ids), bool)
    chosen[picked] = True
    ids[picked] = np.where(draws < 0.8, mask, np.where(draws < 0.9, random, ids[picked]))
    return Tokens(ids, texts.offsets), Tokens(chosen, texts.offsets)


def span_counts(n: np.ndarray, density: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of n tokens are noise and how many spans they form, counted as in T5; a lone token is kept."""
    noise = np.clip(np.rint(density * n), 1, n - 1).clip(0).astype(np.int64)
    spans = np.maximum(np.rint(noise / mean_span), 1).astype(np.int64)
    return noise, np.minimum(spans, np.minimum(noise, n - noise))


def span_lengths(n: np.ndarray, density: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of source and target that `corrupt_spans` makes of n tokens; neither exceeds n + 1."""
    noise, spans = span_counts(n, density, mean_span)
    return n - noise + spans + 1, noise + spans + 1


def corrupt_spans(
    texts: Tokens,
    keys: np.ndarray,
    *,
    density: float,
    mean_span: float,
    vocab_size: int,
    symbols: Symbols = OURS,
) -> tuple[Tokens, Tokens]:
    """Return sources and targets of span corruption (Raffel et al. 2020, section 3.1.4 and the published code).

    Kept and noise spans alternate, a kept one first. Noise span i becomes sentinel i in the source; the target is every
    sentinel followed by the tokens of its span. Both end with EOS.

    Args:
        texts: without symbols.
        keys: the random key of each text.
        density: share of the tokens that are noise.
        mean_span: tokens of a noise span, on average.
        vocab_size: ids that are not sentinels; without `symbols.noise`, sentinels follow after them.
        symbols: EOS, and the sentinels of an imported vocabulary.
    """
    lengths = texts.lengths
    noise, spans = span_counts(lengths, density, mean_span)
    some = np.flatnonzero(spans > 0)
    kept = divide(keys[some], (lengths - noise)[some], spans[some])
    noised = divide(other_keys(keys[some], 1), noise[some], spans[some])
    owner = np.repeat(np.arange(len(keys)), spans)  # of each span
    begins = (np.cumsum(lengths[some]) - lengths[some])[np.repeat(np.arange(len(some)), spans[some])]
    ends = texts.offsets[owner] + np.cumsum(kept + noised) - begins
    starts = ends - noised
    sentinels = noise_ids(symbols, vocab_size, int(spans.max(initial=0)))[ranges(spans)]

    steps = np.zeros(len(texts.values) + 1, np.int64)
    steps[starts] += 1
    spans_before = np.cumsum(steps[:-1])  # of each token, its own included
    steps[ends] -= 1
    is_noise = np.cumsum(steps[:-1]) > 0

    def spelled(picked: np.ndarray, lengths: np.ndarray) -> Tokens:
        """Return the picked tokens of each text, with every sentinel where its span began, and EOS."""
        before = np.cumsum(picked) - picked
        out = np.full(lengths.sum(), symbols.eos, np.int32)
        out[(before + spans_before + _owners(texts.lengths))[picked]] = texts.values[picked]
        out[before[starts] + np.arange(len(starts)) + owner] = sentinels
        return _tokens(out, lengths)

    sources, targets = span_lengths(lengths, density, mean_span)
    return spelled(~is_noise, sources), spelled(is_noise, targets)


def infill(
    texts: Tokens,
    keys: np.ndarray,
    *,
    density: float,
    mean_span: float,
    vocab_size: int,
    symbols: Symbols = OURS,
) -> tuple[Tokens, Tokens]:
    """Return sources and targets of text infilling (Lewis et al. 2020, section 2.2).

    Span lengths are Poisson, drawn until enough tokens are covered; the last span is cut to end there. Each span
    becomes one mask, at a random place, and a span of no tokens inserts one. There are no more masks than covered
    tokens (insertions beyond that are left out), so a source is never longer than its target, which is the text. Both
    end with EOS. The paper's sentence permutation is not included, as examples do not mark sentence boundaries.

    Args:
        texts: without symbols.
        keys: the random key of each text.
        density: share of a text's tokens that spans cover; at least one is covered, if there is one.
        mean_span: tokens of a span, on average.
        vocab_size: without `symbols.noise`, the id of the mask.
        symbols: EOS, and the mask of an imported vocabulary.
    """
    covered = np.clip(np.rint(density * texts.lengths), 1, texts.lengths).astype(np.int64)
    spans, counts = _poisson_spans(keys, covered, mean_span)
    sizes = texts.lengths - covered + counts
    places = choose(other_keys(keys, 1), sizes, counts)
    is_mask, consumed = np.zeros(sizes.sum(), bool), np.ones(sizes.sum(), np.int64)
    is_mask[places], consumed[places] = True, spans
    first = np.minimum(np.cumsum(consumed) - consumed, len(texts.values) - 1)  # of the tokens that a place represents
    source = np.where(is_mask, noise_ids(symbols, vocab_size, 1)[0], texts.values[first])
    return _with_end(source, sizes, symbols.eos), _with_end(texts.values, texts.lengths, symbols.eos)


def mask_of(tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the id of the mask, and how a text spells it."""
    (mask,) = noise_ids(tokenizer.symbols, tokenizer.vocab_size, 1).tolist()
    return mask, (*tokenizer.tokens, MASK)[mask]


def noise_ids(symbols: Symbols, vocab_size: int, count: int) -> np.ndarray:
    """Return the first ids of the noise. Raise UserError where the vocabulary has fewer of its own."""
    if not symbols.noise:
        return vocab_size + np.arange(count)
    if count > len(symbols.noise):
        raise UserError(
            f"data.max_target_length: a text of {count} noise spans needs {count} sentinels, and the vocabulary has "
            f"{len(symbols.noise)}: lower it"
        )
    return np.array(symbols.noise[:count])


def _poisson_spans(keys: np.ndarray, covered: np.ndarray, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return span lengths that sum to `covered` [n], in the order drawn, and how many: no more than that sum."""
    draws = 2 * covered + SURPLUS
    owner = _owners(draws)
    lengths = poisson(keys, draws, mean_span)
    lengths[np.cumsum(draws) - 1] = covered  # the last draw takes all that is left
    before = np.cumsum(lengths) - lengths
    before -= before[np.cumsum(draws) - draws][owner]
    lengths = np.minimum(lengths, covered[owner] - before)  # 0 or less once all are covered
    used = before < covered[owner]
    insertion = used & (lengths == 0)
    room = covered - np.bincount(owner[used & ~insertion], minlength=len(keys))
    earlier = np.cumsum(insertion) - insertion
    earlier -= earlier[np.cumsum(draws) - draws][owner]
    kept = used & ~(insertion & (earlier >= room[owner]))
    return lengths[kept], np.bincount(owner[kept], minlength=len(keys))


def surrounded(texts: Tokens, symbols: Symbols) -> Tokens:
    """Return the texts, which end with EOS, with the symbols that stand before a text and after its EOS."""
    before, after, count = symbols.before, symbols.after, len(texts.lengths)
    ends = np.stack([texts.offsets[:-1], texts.offsets[1:]], axis=1).ravel()
    places = np.repeat(ends, np.tile([len(before), len(after)], count))
    values = np.insert(texts.values, places, np.tile([*before, *after], count))
    return Tokens(values, texts.offsets + np.arange(count + 1) * len((*before, *after)))


def _owners(lengths: np.ndarray) -> np.ndarray:
    """Return the number of the text that each token belongs to."""
    return np.repeat(np.arange(len(lengths)), lengths)


def _tokens(values: np.ndarray, lengths: np.ndarray) -> Tokens:
    return Tokens(values, np.concatenate([[0], np.cumsum(lengths)]))


def _with_end(values: np.ndarray, lengths: np.ndarray, eos: int) -> Tokens:
    out = np.full(len(values) + len(lengths), eos, np.int32)
    out[np.arange(len(values)) + _owners(lengths)] = values
    return _tokens(out, lengths + 1)
