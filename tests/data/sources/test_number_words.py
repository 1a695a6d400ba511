"""Number words: the irregular spellings, and that no two numbers share one."""

import pytest

from jformer.data.sources.quickstart.number_words import english, english_ordinal, german, german_ordinal


@pytest.mark.parametrize(
    ("n", "words", "wörter"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (76, "seventy-six", "sechsundsiebzig"),
        (100, "one hundred", "einhundert"),
        (101, "one hundred one", "einhunderteins"),
        (1_000, "one thousand", "eintausend"),
        (1_012, "one thousand twelve", "eintausendzwölf"),
        (21_101, "twenty-one thousand one hundred one", "einundzwanzigtausendeinhunderteins"),
        (101_000, "one hundred one thousand", "einhunderteintausend"),
        (1_000_000, "one million", "eine Million"),
        (1_000_001, "one million one", "eine Million eins"),
        (21_300_000, "twenty-one million three hundred thousand", "einundzwanzig Millionen dreihunderttausend"),
    ],
)
def test_cardinals_are_spelled_by_the_book(n: int, words: str, wörter: str) -> None:
    assert (english(n), german(n)) == (words, wörter)


@pytest.mark.parametrize(
    ("n", "words", "wörter"),
    [
        (1, "first", "erste"),
        (3, "third", "dritte"),
        (7, "seventh", "siebte"),
        (8, "eighth", "achte"),
        (12, "twelfth", "zwölfte"),
        (19, "nineteenth", "neunzehnte"),
        (20, "twentieth", "zwanzigste"),
        (42, "forty-second", "zweiundvierzigste"),
        (100, "one hundredth", "einhundertste"),
        (101, "one hundred first", "einhunderterste"),
        (1_003, "one thousand third", "eintausenddritte"),
        (20_117, "twenty thousand one hundred seventeenth", "zwanzigtausendeinhundertsiebzehnte"),
    ],
)
def test_ordinals_are_spelled_by_the_book(n: int, words: str, wörter: str) -> None:
    assert (english_ordinal(n), german_ordinal(n)) == (words, wörter)


@pytest.mark.parametrize("spell", [english, german, english_ordinal, german_ordinal])
def test_every_number_has_its_own_spelling(spell) -> None:
    numbers = [*range(1, 3_000), *range(3_000, 1_000_000, 997)]
    assert len({spell(n) for n in numbers}) == len(numbers)
