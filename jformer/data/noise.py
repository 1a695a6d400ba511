"""Noise over one example's token ids: masks, sentinels and infilled spans. No batches, and no padding.

Every function is pure: it draws from the generator it is given. Symbols of the noise are those that the vocabulary has
for it, or else ids past it, of which `vocab_size` is the first. How long the noised sequences are depends on the number
of tokens alone (masks, sentinels) or never exceeds it (infilling), so batches can be planned without drawing any noise.
"""

import numpy as np

from jformer.data.tokenizers import NUM_SYMBOLS, Symbols
from jformer.errors import UserError

OURS = Symbols()


def mask_tokens(
    ids: np.ndarray, rng: np.random.Generator, *, density: float, vocab_size: int, symbols: Symbols = OURS
) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [n] with some corrupted, and which they are, as booleans [n] (Devlin et al. 2019, section 3.1).

    A share `density` of the tokens between BOS and EOS is chosen, at least one. Of those 80 % become the mask, 10 % a
    random ordinary token and 10 % stay as they are.
    """
    candidates = np.flatnonzero((ids != symbols.bos) & (ids != symbols.eos))
    count = max(1, round(density * len(candidates))) if len(candidates) else 0
    picked = rng.choice(candidates, count, replace=False)
    draws = rng.random(count)
    random = rng.integers(0 if symbols.noise else NUM_SYMBOLS, vocab_size, count)
    corrupted, chosen = ids.astype(np.int32), np.zeros(len(ids), bool)
    corrupted[picked] = np.where(
        draws < 0.8, noise_ids(symbols, vocab_size, 1)[0], np.where(draws < 0.9, random, ids[picked])
    )
    chosen[picked] = True
    return corrupted, chosen


def span_counts(n: np.ndarray, density: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of n tokens are noise and how many spans they form, as T5 counts them; a lone token is kept."""
    noise = np.minimum(np.maximum(np.rint(density * n), 1), n - 1).astype(np.int64)
    spans = np.maximum(np.rint(noise / mean_span), 1).astype(np.int64)
    return noise, np.minimum(spans, np.minimum(noise, n - noise))


def span_lengths(n: np.ndarray, density: float, mean_span: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of source and target that `corrupt_spans` makes of n tokens; neither exceeds n + 1."""
    noise, spans = span_counts(n, density, mean_span)
    return n - noise + spans + 1, noise + spans + 1


def corrupt_spans(
    ids: np.ndarray,
    rng: np.random.Generator,
    *,
    density: float,
    mean_span: float,
    vocab_size: int,
    symbols: Symbols = OURS,
) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target of span corruption (Raffel et al. 2020, section 3.1.4 and the published code).

    Kept and noise spans alternate, a kept one first. Noise span i becomes sentinel i in the source; the target is every
    sentinel followed by the tokens of its span. Both end with EOS.
    """
    noise, spans = (int(x) for x in span_counts(np.array(len(ids)), density, mean_span))
    if not spans:
        return np.append(ids, symbols.eos).astype(np.int32), np.array([symbols.eos], np.int32)
    kept, noised = _segments(len(ids) - noise, spans, rng), _segments(noise, spans, rng)
    ends = np.cumsum(kept + noised)
    starts = ends - noised  # of the noise
    is_noise = np.repeat(np.tile([False, True], spans), np.stack([kept, noised], axis=1).ravel())
    sentinels = noise_ids(symbols, vocab_size, spans)
    source = np.insert(ids.astype(np.int32), starts, sentinels)[~np.insert(is_noise, starts, False)]
    target = np.insert(ids[is_noise].astype(np.int32), np.cumsum(noised) - noised, sentinels)
    end = np.int32(symbols.eos)
    return np.append(source, end), np.append(target, end)


def infill(
    ids: np.ndarray,
    rng: np.random.Generator,
    *,
    density: float,
    mean_span: float,
    vocab_size: int,
    symbols: Symbols = OURS,
) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target of text infilling (Lewis et al. 2020, section 2.2).

    Span lengths are Poisson, drawn until a share `density` of the tokens is covered, at least one; the last span is cut
    to end there. Each span becomes one mask, at a random place, and a span of no tokens inserts one.
    There are no more masks than covered tokens (insertions beyond that are left out), so the source is never longer
    than the target, which is the text. Both end with EOS. The paper's other noise, sentences in another order, is not
    included: our examples do not know where sentences end.
    """
    lengths = _poisson_spans(max(1, round(density * len(ids))), mean_span, rng)
    size = len(ids) - int(lengths.sum()) + len(lengths)
    is_mask, consumed = np.zeros(size, bool), np.ones(size, np.int64)
    places = rng.choice(size, len(lengths), replace=False)
    is_mask[places], consumed[places] = True, lengths
    source = np.full(size + 1, noise_ids(symbols, vocab_size, 1)[0], np.int32)
    source[:-1][~is_mask] = ids[(np.cumsum(consumed) - consumed)[~is_mask]]
    source[-1] = symbols.eos
    return source, np.append(ids, symbols.eos).astype(np.int32)


def noise_ids(symbols: Symbols, vocab_size: int, count: int) -> np.ndarray:
    """Return the first ids of the noise. Raise UserError where the vocabulary has fewer of its own."""
    if not symbols.noise:
        return vocab_size + np.arange(count)
    if count > len(symbols.noise):
        raise UserError(
            f"data.max_target_length: a text of {count} noise spans needs as many sentinels, and the vocabulary has "
            f"{len(symbols.noise)}: lower it"
        )
    return np.array(symbols.noise[:count])


def _poisson_spans(covered: int, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """Return span lengths that sum to `covered`, in the order drawn; no more of them than that sum."""
    lengths: list[int] = []
    while sum(lengths) < covered:
        lengths.append(min(int(rng.poisson(mean_span)), covered - sum(lengths)))
    drawn = np.array(lengths)
    insertions = np.flatnonzero(drawn == 0)
    return np.delete(drawn, insertions[max(0, covered - int((drawn > 0).sum())) :])


def _segments(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the lengths of a random division of `total` into `parts`, none empty, all divisions being as likely."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
