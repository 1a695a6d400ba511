import numpy as np
import pytest

from jformer.data.corpus import Tokens
from jformer.data.tokenizers import BOS, EOS, NUM_SYMBOLS
from jformer.tasks import noise
from jformer.tasks.keyed_draws import make_keys
from jformer.tasks.noise import span_counts, span_lengths

V = 1_000
T5 = {"density": 0.15, "mean_span": 3.0, "vocab_size": V}
BART = {"density": 0.3, "mean_span": 3.0, "vocab_size": V}


def split(tokens):
    """Return what belongs to each text."""
    return np.split(tokens.values, tokens.offsets[1:-1])


def of_each(function, texts, seeds, **options):
    """Return both results of a noise for each text, all made at once."""
    joined = Tokens(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))
    results = function(joined, make_keys((), np.array(seeds)), **options)
    return list(zip(*map(split, results), strict=True))


def mask_tokens(ids, seed, **options):
    return of_each(noise.mask_tokens, [ids], [seed], **options)[0]


def corrupt_spans(ids, seed, **options):
    return of_each(noise.corrupt_spans, [ids], [seed], **options)[0]


def infill(ids, seed, **options):
    return of_each(noise.infill, [ids], [seed], **options)[0]


def text(n):
    """Return n ids that all differ."""
    return np.arange(NUM_SYMBOLS, NUM_SYMBOLS + n)


def share(count, total, expected):
    """Assert that a count lies within four standard deviations of the binomial distribution."""
    assert abs(count - expected * total) < 4 * np.sqrt(total * expected * (1 - expected)) + 1, (count, total, expected)


def masked(n, seed=0, density=0.15):
    ids = np.array([BOS, *text(n), EOS])
    return ids, *mask_tokens(ids, seed, density=density, vocab_size=V)


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2, 1), (3, 1), (10, 2), (11, 2), (100, 15), (256, 38), (510, 76)])
def test_fifteen_percent_of_the_tokens_are_chosen_and_at_least_one(n, count):
    for seed in range(20):
        assert masked(n, seed)[2].sum() == count


def test_neither_bos_nor_eos_is_ever_chosen():
    ids = np.array([BOS, 7, EOS, 8, EOS])
    chosen = sum(mask_tokens(ids, seed, density=0.5, vocab_size=V)[1] for seed in range(200))
    assert chosen.tolist()[::2] == [0, 0, 0]
    assert chosen[1] > 50 < chosen[3]


def test_a_sequence_without_text_stays_as_it_is():
    corrupted, chosen = mask_tokens(np.array([BOS, EOS]), 0, density=0.15, vocab_size=V)
    assert (corrupted.tolist(), chosen.any()) == ([BOS, EOS], False)


def test_every_position_is_as_likely_to_be_chosen():
    counts = sum(masked(20, seed)[2] for seed in range(2_000))[1:-1]
    for count in counts:
        share(count, 2_000, 0.15)


def test_chosen_tokens_are_masked_replaced_or_kept_as_eighty_ten_ten():
    masks = random = kept = 0
    seen = set()
    for seed in range(200):
        ids, corrupted, chosen = masked(400, seed)
        np.testing.assert_array_equal(corrupted[~chosen], ids[~chosen])
        masks += (corrupted[chosen] == V).sum()
        kept += (corrupted[chosen] == ids[chosen]).sum()
        replaced = corrupted[chosen & (corrupted != V) & (corrupted != ids)]
        random += len(replaced)
        seen |= set(replaced.tolist())
    total = 200 * 60
    share(masks, total, 0.8)
    share(random, total, 0.1)
    share(kept, total, 0.1)
    assert min(seen) >= NUM_SYMBOLS
    assert max(seen) < V
    assert len(seen) > 600  # of 996 ordinary tokens


@pytest.mark.parametrize("n", [*range(30), 114, 512, 568])
@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 1.0), (0.9, 2.0), (0.15, 10.0)])
def test_spans_have_the_lengths_foretold_and_both_sides_give_the_text_back(n, density, mean_span):
    ids = text(n)
    for seed in range(5):
        source, target = corrupt_spans(ids, seed, density=density, mean_span=mean_span, vocab_size=V)
        assert (len(source), len(target)) == tuple(span_lengths(np.array(n), density, mean_span))
        assert max(len(source), len(target)) <= n + 1
        assert source[-1] == EOS == target[-1]
        assert source.dtype == target.dtype == np.int32
        assert rebuilt(source[:-1], target[:-1]) == ids.tolist()


def rebuilt(source, target):
    """Put what the target spells out in the places of the sentinels."""
    starts = np.flatnonzero(target >= V)
    assert target[starts].tolist() == list(range(V, V + len(starts)))
    assert source[source >= V].tolist() == target[starts].tolist()
    spans = {int(part[0]): part[1:].tolist() for part in np.split(target, starts)[1:]}
    assert all(spans.values())
    return [token for place in source.tolist() for token in spans.get(place, [place])]


def test_t5_turns_512_tokens_into_the_lengths_of_the_paper():
    """Of 568 tokens 85 are noise in 28 spans: the source has 512 with its end symbol, the target 114."""
    assert span_lengths(np.array([568]), 0.15, 3.0) == (512, 114)


def test_lengths_of_many_texts_are_told_at_once():
    n = np.arange(1, 200)
    source, target = span_lengths(n, 0.15, 3.0)
    assert [(s, t) for s, t in zip(source, target, strict=True)] == [span_lengths(k, 0.15, 3.0) for k in n]
    assert (source[0], target[0]) == (2, 1)  # a lone token is kept


def test_the_longest_text_needs_the_most_sentinels():
    for density in (0.15, 0.5, 0.99):
        spans = span_counts(np.arange(1, 600), density, 3.0)[1]
        assert (np.diff(spans) >= 0).all()


def test_a_share_of_the_tokens_is_noise_in_spans_of_the_mean_length():
    noise, spans = span_counts(np.array([200, 1_000]), 0.15, 3.0)
    assert (noise.tolist(), spans.tolist()) == ([30, 150], [10, 50])
    lengths, firsts = [], []
    for seed in range(300):
        source, target = corrupt_spans(text(200), seed, **T5)
        lengths += np.diff(np.flatnonzero(np.append(target, V) >= V)).tolist()[:-1]
        firsts.append(int(np.flatnonzero(source >= V)[0]))
    assert min(firsts) >= 1  # a kept span comes first
    assert {1, 2, 3, 4, 5, 6} <= {length - 1 for length in lengths}
    assert np.mean(lengths) - 1 == pytest.approx(3.0, abs=0.1)


def test_all_divisions_into_spans_are_as_likely():
    """7 tokens, 4 of them noise in 2 spans: 3 divisions of the noise and 2 of the rest make 6 outcomes."""
    options = {"density": 4 / 7, "mean_span": 2.0, "vocab_size": V}
    seen = [corrupt_spans(text(7), seed, **options)[0].tobytes() for seed in range(1_200)]
    assert len(set(seen)) == 6
    for outcome in set(seen):
        share(seen.count(outcome), 1_200, 1 / 6)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("mean_span", [1.0, 3.0])
def test_infilling_keeps_the_order_and_covers_its_share(n, mean_span):
    for seed in range(20):
        source, target = infill(text(n), seed, density=0.3, mean_span=mean_span, vocab_size=V)
        kept, masks = source[source < V], (source == V).sum()
        assert target.tolist() == [*text(n), EOS]
        assert kept[-1] == EOS
        assert (np.diff(kept[:-1]) > 0).all()
        assert len(kept) - 1 == n - max(1, round(0.3 * n))
        assert 1 <= masks <= max(1, round(0.3 * n))
        assert len(source) <= len(target)
        assert source.dtype == target.dtype == np.int32


def test_infilled_spans_are_poisson_and_empty_ones_insert_a_mask():
    """Where masks lie apart, the tokens missing between their neighbours are the length of the span."""
    lengths = []
    for seed in range(200):
        source, _ = infill(text(990), seed, density=0.02, mean_span=3.0, vocab_size=V)
        inner = np.concatenate([[NUM_SYMBOLS - 1], source[:-1], [NUM_SYMBOLS + 990]])
        at = np.flatnonzero(inner == V)
        alone = at[(inner[at - 1] != V) & (inner[at + 1] != V)]
        lengths += (inner[alone + 1] - inner[alone - 1] - 1).tolist()
    assert len(lengths) > 1_200
    share(lengths.count(0), len(lengths), np.exp(-3))
    share(lengths.count(2), len(lengths), 4.5 * np.exp(-3))
    assert max(lengths) > 6


def test_infilled_spans_stand_anywhere():
    ends = [infill(text(30), seed, **BART)[0][[0, -2]] == V for seed in range(300)]
    first, last = np.sum(ends, axis=0)
    assert 20 < first < 90
    assert 20 < last < 90


NOISES = {
    "masks": (noise.mask_tokens, {"density": 0.15, "vocab_size": V}),
    "t5": (noise.corrupt_spans, T5),
    "bart": (noise.infill, BART),
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_of_a_text_is_a_function_of_the_text_and_its_key(name):
    function, options = NOISES[name]
    texts = [text(n).astype(np.uint16) for n in (100, 1, 2, 100, 0, 3, 40)]
    together = of_each(function, texts, seeds := [3, 1, 2, 4, 7, 5, 6], **options)
    for one, seed, made in zip(texts, seeds, together, strict=True):
        alone = of_each(function, [one], [seed], **options)[0]
        assert [side.tolist() for side in made] == [side.tolist() for side in alone]
    assert together[0][0].tolist() != together[3][0].tolist()  # the same text under another key
    assert texts[0].tolist() == text(100).tolist()


@pytest.mark.parametrize("name", NOISES)
def test_a_part_of_a_batch_may_be_empty(name):
    function, options = NOISES[name]
    nothing = Tokens(np.zeros(0, np.int32), np.zeros(1, np.int64))
    for side in function(nothing, make_keys((), np.zeros(0, np.int64)), **options):
        assert (len(side.values), side.offsets.tolist()) == (0, [0])
