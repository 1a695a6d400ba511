"""Multinomial naive Bayes over words: the baseline that a text classifier has to beat."""

import math
from collections import Counter
from collections.abc import Sequence

from jformer.data.sources.split import Pair


def naive_bayes(train: Sequence[Pair], test: Sequence[Pair]) -> float:
    """Return the accuracy of multinomial naive Bayes with add-one smoothing (Manning et al. 2008, figure 13.2).

    Words are separated by spaces; those that training lacks are ignored.
    """
    labels = Counter(pair.target for pair in train)
    counts: dict[str, Counter[str]] = {label: Counter() for label in labels}
    for pair in train:
        counts[pair.target].update(pair.source.split())
    vocabulary = set().union(*counts.values())
    totals = {label: words.total() + len(vocabulary) for label, words in counts.items()}

    def score(text: str, label: str) -> float:
        known = [word for word in text.split() if word in vocabulary]
        return math.log(labels[label]) + sum(math.log((counts[label][word] + 1) / totals[label]) for word in known)

    right = sum(max(labels, key=lambda label: score(pair.source, label)) == pair.target for pair in test)
    return right / len(test)
