"""Minimum Bayes risk: rank texts by their agreement with all candidates. No model here.

Eikema and Aziz 2020 draw the candidates from the model by plain sampling, and estimate a text's expected utility by its
mean over them; Freitag et al. 2022 show how much depends on the utility. Both utilities here are sentence scores of
sacreBLEU; a user's command may give others.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from sacrebleu import BLEU, CHRF
from sacrebleu.metrics.helpers import extract_all_char_ngrams, extract_word_ngrams

BLEU_ORDER = 4


def rank(candidates: Sequence[str], utilities: np.ndarray) -> tuple[list[int], list[float]]:
    """Return the indices of the distinct candidates, best first, and the expected utility of each.

    The expected utility of a candidate is its mean utility against all candidates, itself among them, as references. A
    text drawn k times counts k times as a reference and is ranked once, at its first index. Ties keep the order drawn.
    `utilities` [n n]: of each distinct candidate, in the order of first indices, against each as its reference.

    >>> candidates = ["the cat sat", "a dog", "the cat sat down"]
    >>> order, expected = rank(candidates, chrf(candidates))
    >>> order, [round(each) for each in expected]
    ([2, 0, 1], [69, 57, 37])
    """
    drawn = Counter(candidates)
    expected = utilities @ (np.array(list(drawn.values())) / len(candidates))
    order, first = np.argsort(-expected, kind="stable"), [*map(candidates.index, drawn)]
    return [first[i] for i in order], expected[order].tolist()


def chrf(texts: Sequence[str]) -> np.ndarray:
    """Return sacreBLEU's sentence chrF of every text (row) against each as its reference (column).

    Precision and recall are means over the orders that both texts are long enough for (Popović 2015).

    >>> chrf(["ja", "ja", "nein"]).round().tolist()
    [[100.0, 100.0, 0.0], [100.0, 100.0, 0.0], [0.0, 0.0, 100.0]]
    """
    matches, totals = _overlaps([extract_all_char_ngrams(text, CHRF.CHAR_ORDER, False) for text in texts])
    both = (totals[:, :, None] > 0) & (totals[:, None, :] > 0)
    orders = np.maximum(both.sum(axis=0), 1)
    precision = (matches / np.maximum(totals[:, :, None], 1)).sum(axis=0) / orders
    recall = (matches / np.maximum(totals[:, None, :], 1)).sum(axis=0) / orders
    weight = CHRF.BETA**2
    weighed = weight * precision + recall
    return 100 * (1 + weight) * precision * recall / np.where(weighed > 0, weighed, 1)


def bleu(texts: Sequence[str], tokenization: str = "13a") -> np.ndarray:
    """Return sacreBLEU's sentence BLEU, smoothed and with effective order, of every text against each.

    >>> bleu(["the cat sat", "the cat"]).round().tolist()
    [[100.0, 55.0], [61.0, 100.0]]
    """
    tokenize = BLEU(tokenize=tokenization).tokenizer
    words = [tokenize(text.rstrip()).split() for text in texts]
    orders = range(1, BLEU_ORDER + 1)
    matches, totals = _overlaps([[extract_word_ngrams(each, n) for n in orders] for each in words])

    def score(hypothesis: int, reference: int) -> float:
        counts = matches[:, hypothesis, reference].tolist(), totals[:, hypothesis].tolist()
        lengths = len(words[hypothesis]), len(words[reference])
        return BLEU.compute_bleu(*counts, *lengths, smooth_method="exp", effective_order=True).score

    every = range(len(texts))
    return np.array([[score(hypothesis, reference) for reference in every] for hypothesis in every])


def _overlaps(counts: Sequence[Sequence[Counter[str]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each order, the n-grams that every two texts share [order n n], and those of every text [order n].

    sacreBLEU would split every text once per comparison; here each is split once, and a table compares them.
    """
    matches, totals = [], []
    for order in zip(*counts, strict=True):
        column = {ngram: i for i, ngram in enumerate(dict.fromkeys(ngram for text in order for ngram in text))}
        table = np.zeros((len(order), len(column)), np.int64)
        for row, text in zip(table, order, strict=True):
            row[[column[ngram] for ngram in text]] = list(text.values())
        matches.append([np.minimum(row, table).sum(axis=1) for row in table])
        totals.append(table.sum(axis=1))
    return np.array(matches), np.array(totals)
