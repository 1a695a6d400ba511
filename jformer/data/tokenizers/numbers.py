"""Numbers as tokens: the bits of a float32, in units of the training numbers' standard deviation."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from jformer.data.tokenizers.symbols import OneFile, Symbols, to_json
from jformer.errors import UserError


class NumberTokenizer(OneFile):
    """A number is one id: its distance from the mean, in standard deviations, as the 32 bits of a float."""

    vocab_size = 1 << 32
    tokens: list[str] = []  # noqa: RUF012  # numbers are not listed
    symbols = Symbols(unk=-1)

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__(".json", to_json(kind="number", mean=mean, deviation=deviation))
        self.mean, self.deviation = mean, deviation

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the id of each number. Raise UserError for the first text that is not a number."""
        values = np.array([(_parse(line) - self.mean) / self.deviation for line in lines], np.float32)
        return [[int(bits)] for bits in values.view(np.uint32)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the number of one id, to six digits, or more where numbers are large relative to their deviation."""
        (value,) = np.array(ids, np.uint32).view(np.float32)
        number = float(value) * self.deviation + self.mean
        ratio = min(max(abs(number) / self.deviation, 1), 1e9)  # a float has 15 digits
        return f"{number:.{6 + int(math.log10(ratio))}g}"


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _parse(text: str) -> float:
    if not is_number(text):
        raise UserError(f"label {text[:40]!r}: data.labels='number' needs a finite number; fix the data")
    return float(text)


def learn_numbers(lines: Iterable[str]) -> NumberTokenizer:
    """Take the mean and the standard deviation of the training numbers."""
    values = np.array([_parse(line) for line in lines if line.strip()])
    return NumberTokenizer(float(values.mean()), float(values.std()) or 1.0)
