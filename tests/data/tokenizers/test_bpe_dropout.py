"""BPE-dropout cuts as sentencepiece does where nothing is dropped, else with the probabilities of the paper."""

import itertools
from collections import Counter, defaultdict

import pytest

from jformer.data.tokenizers import UNK, learn
from jformer.data.tokenizers.bpe_dropout import DRAWS, LONGEST, REMEMBERED, WORDS, BpeDropout
from tests.data.tokenizers.test_tokenizers import corpus
from tests.hostile_texts import hostile_lines


@pytest.mark.parametrize("normalization", ["identity", "nfkc"])
@pytest.mark.parametrize("split_digits", [False, True])
def test_without_dropout_texts_are_cut_as_sentencepiece_cuts_them(normalization, split_digits):
    hostile = hostile_lines(2_000)
    plain = learn("bpe", [*corpus(), *hostile[:200]], 2_000, normalization, split_digits)
    lines = [*corpus(50), *hostile, "", " ", "  a  b ", "<s>", "▁▁", "家家 家"]
    assert BpeDropout(plain, 0.0, "").encode(lines) == plain.encode(lines)
    assert any(UNK in ids for ids in plain.encode(lines))


def test_cuts_depend_on_the_key_and_decode_to_the_same_text():
    plain = learn("bpe", corpus(), 200, "identity", False)
    lines = corpus(40)
    first, again, other = (BpeDropout(plain, 0.2, key).encode(lines) for key in ("1", "1", "2"))
    assert first == again != other
    assert first != plain.encode(lines)
    assert [plain.decode(ids) for ids in first] == lines
    prints = {BpeDropout(plain, share, key).fingerprint for share in (0.1, 0.2) for key in "12"}
    assert len({plain.fingerprint, *prints}) == 5


def test_each_cut_has_the_probability_of_the_paper():
    plain = learn("bpe", ["abab abc bc ab abcab"] * 9, 20, "identity", False)
    share, word, draws = 0.3, "▁abcab", 20_000
    dropping = BpeDropout(plain, share, "")
    found = Counter(tuple(dropping._draw(word)) for _ in range(draws))
    expected = enumerated({piece: i for i, piece in enumerate(plain.tokens)}, tuple(word), share)
    assert len(expected) > 5
    assert sum(expected.values()) == pytest.approx(1)
    for ids, probability in expected.items():
        assert found[ids] / draws == pytest.approx(probability, abs=0.015)  # more than four standard errors


def test_a_text_without_spaces_is_cut_in_parts_and_not_remembered():
    plain = learn("bpe", ["ab" * 30] * 9, 20, "identity", False)
    dropping = BpeDropout(plain, 0.1, "")
    text = "ab" * 5_000
    (ids,) = dropping.encode([text])
    assert plain.decode(ids) == text
    assert not [word for word in dropping._cuts if len(word) > REMEMBERED]
    assert max(map(len, WORDS.findall("▁" + text))) == LONGEST


def enumerated(rank, pieces, share):
    """Return the probability of each cut: of the merges that are possible, every subset may be what was not dropped."""
    merges = [(rank[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in rank]
    probabilities = defaultdict(float)
    for size in range(len(merges) + 1):
        for kept in itertools.combinations(merges, size):
            weight = (1 - share) ** size * share ** (len(merges) - size)
            if not kept:
                probabilities[tuple(rank[piece] for piece in pieces)] += weight
                continue
            i = min(kept)[1]
            for ids, inner in enumerated(
                rank, (*pieces[:i], pieces[i] + pieces[i + 1], *pieces[i + 2 :]), share
            ).items():
                probabilities[ids] += weight * inner
    return probabilities


def test_words_that_come_often_take_turns_among_their_cuts():
    plain = learn("bpe", corpus(), 200, "identity", False)
    (ids,) = BpeDropout(plain, 0.5, "").encode(["house " * 3 * DRAWS])
    cuts = BpeDropout(plain, 0.5, "").encode(["house"] * 3 * DRAWS)
    assert ids[: sum(map(len, cuts))] == [i for cut in cuts for i in cut]
    assert cuts[:DRAWS] == cuts[DRAWS : 2 * DRAWS]
    assert 1 < len({*map(tuple, cuts)}) <= DRAWS
