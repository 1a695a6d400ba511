"""Spell whole numbers in English and German: cardinals and ordinals, by rules of our own.

The spelling follows CLDR's rule-based number formats: English without "and", German in one word below a million
and always with its "ein" ("einhunderteins", "eintausend"). Cardinals hold for 0 to 99,999,999: above that, German has
to inflect the millions ("einhunderteine Millionen"). Ordinals hold for 1 to 999,999.
"""

_ENGLISH_ONES = str.split(
    "zero one two three four five six seven eight nine ten eleven twelve "
    "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
_ENGLISH_TENS = str.split("_ ten twenty thirty forty fifty sixty seventy eighty ninety")
_ENGLISH_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

_GERMAN_ONES = str.split(
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf "
    "dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
)
_GERMAN_TENS = str.split("_ zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
_GERMAN_ORDINALS = {1: "erste", 3: "dritte", 7: "siebte", 8: "achte"}


def english(n: int) -> str:
    """Spell n in English: 1,234 → "one thousand two hundred thirty-four"."""
    if n < 20:
        return _ENGLISH_ONES[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return f"{_ENGLISH_TENS[tens]}-{_ENGLISH_ONES[ones]}" if ones else _ENGLISH_TENS[tens]
    unit, name = next((u, w) for u, w in ((10**6, "million"), (1000, "thousand"), (100, "hundred")) if n >= u)
    head, rest = divmod(n, unit)
    return f"{english(head)} {name} {english(rest)}" if rest else f"{english(head)} {name}"


def english_ordinal(n: int) -> str:
    """Spell the place n in English: 1,021 → "one thousand twenty-first"."""
    words = english(n)
    cut = max(words.rfind(" "), words.rfind("-")) + 1
    last = words[cut:]
    regular = last.removesuffix("y") + "ieth" if last.endswith("y") else last + "th"
    return words[:cut] + _ENGLISH_ORDINALS.get(last, regular)


def german(n: int) -> str:
    """Spell n in German, as one counts: 1,201 → "eintausendzweihunderteins"."""
    return _german_stem(n) + ("s" if n % 100 == 1 else "")


def german_ordinal(n: int) -> str:
    """Spell the place n in German, after "der": 1,021 → "eintausendeinundzwanzigste"."""
    hundreds, last = divmod(n, 100)
    if last in _GERMAN_ORDINALS:
        return (_german_stem(hundreds * 100) if hundreds else "") + _GERMAN_ORDINALS[last]
    return _german_stem(n) + ("te" if 0 < last < 20 else "ste")


def _german_stem(n: int) -> str:
    """Spell n so that a word can follow: a final one stays "ein", as in "hunderteintausend"."""
    if n < 20:
        return _GERMAN_ONES[n]
    if n < 100:
        tens, ones = divmod(n, 10)
        return f"{_GERMAN_ONES[ones]}und{_GERMAN_TENS[tens]}" if ones else _GERMAN_TENS[tens]
    if n < 10**6:
        unit, name = (1000, "tausend") if n >= 1000 else (100, "hundert")
        head, rest = divmod(n, unit)
        return _german_stem(head) + name + (_german_stem(rest) if rest else "")
    millions, rest = divmod(n, 10**6)
    counted = "eine Million" if millions == 1 else f"{_german_stem(millions)} Millionen"
    return f"{counted} {_german_stem(rest)}" if rest else counted
