"""CIDEr-D: tf-idf-weighted n-gram similarity of captions and references. Imports no JAX.

Vedantam et al. 2015, sections 4 and 5. A caption is a vector over its n-grams, n = 1 to 4: their counts, times the
logarithm of the inverse share of images whose references contain them. Letters: w an n-gram, i an image.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from jformer.data.text import MARKS, UNSPACED

LONGEST = 4  # words of an n-gram
_WORD = rf"(?:(?![{UNSPACED}])\w[{MARKS}]*)+"
WORD = re.compile(rf"(?=\w)[{UNSPACED}][{MARKS}]*|{_WORD}(?:['’]{_WORD})*")
SIGMA = 6.0  # of the Gaussian penalty for a difference in length, in words
SCALE = 10.0
SIGNATURE = f"words:lowercase|n:1-{LONGEST}|sigma:{SIGMA:g}|idf:references of this set"

Ngram = tuple[str, ...]


def cider_d(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Return the CIDEr-D of every output, 0 to 10, against the references of its image, one or several.

    Document frequencies are counted in `references`, image by image. An n-gram found for every image has weight 0, so a
    set of one image scores 0. Raises ValueError if the numbers of outputs and references differ.
    """
    if len(outputs) != len(references):
        raise ValueError(f"{len(outputs)} outputs but references of {len(references)} images")
    counted = [[ngrams(text) for text in texts] for texts in references]
    images = Counter(w for texts in counted for w in set().union(*texts))  # document frequency
    weights = {w: math.log(len(references) / count) for w, count in images.items()}
    rarest = math.log(len(references))  # for n-grams in no reference

    def similarity(output: Counter[Ngram], reference: Counter[Ngram]) -> float:
        words = [sum(count for w, count in each.items() if len(w) == 1) for each in (output, reference)]
        closeness = math.exp(-((words[0] - words[1]) ** 2) / (2 * SIGMA**2))
        ours, theirs = ({w: n * weights.get(w, rarest) for w, n in each.items()} for each in (output, reference))
        return closeness * sum(_clipped_cosine(ours, theirs, n) for n in range(1, LONGEST + 1)) / LONGEST

    found = []
    for text, texts in zip(outputs, counted, strict=True):
        output = ngrams(text)
        found.append(SCALE * sum(similarity(output, reference) for reference in texts) / len(texts))
    return found


def ngrams(text: str) -> Counter[Ngram]:
    """Return how often each n-gram of 1 to 4 words is in a text; words are lowercase, without punctuation.

    Each letter of a script without spaces, such as Han, is a word.

    >>> ngrams("A cat, a dog")[("a",)]
    2
    """
    words = WORD.findall(text.lower())
    return Counter(tuple(words[i : i + n]) for n in range(1, LONGEST + 1) for i in range(len(words) - n + 1))


def _clipped_cosine(output: Mapping[Ngram, float], reference: Mapping[Ngram, float], n: int) -> float:
    """Return the cosine over n-grams of n words, an output's entries clipped to the reference's (section 5)."""
    ours, theirs = ({w: value for w, value in each.items() if len(w) == n} for each in (output, reference))
    norms = math.sqrt(sum(x**2 for x in ours.values())) * math.sqrt(sum(x**2 for x in theirs.values()))
    shared = sum(min(ours[w], theirs[w]) * theirs[w] for w in ours.keys() & theirs.keys())
    return shared / norms if norms else 0.0
