"""Contents (a day, an amount of money, a list of countries) drawn at random and rendered in English and German.

One function a family; all use CLDR's patterns and names through Babel, or our own number words. `quickstart` decides
the share of each family, which pairs are duplicates, and the split of a pair.
"""

import datetime
from collections.abc import Callable, Sequence
from decimal import Decimal
from random import Random
from typing import Literal, TypeVar

from babel import Locale, dates, lists, numbers, units

from jformer.data.sources.quickstart import number_words

Drawn = tuple[str, str, str]  # source, target, and the key: the content in no language
T = TypeVar("T")

_ENGLISH, _GERMAN = Locale("en"), Locale("de")
# CLDR puts no-break and thin spaces before AM, € and % and around dashes, and soft hyphens in words. A corpus with
# several kinds of blank would only test the tokenizer.
_PLAIN = str.maketrans({"\u202f": " ", "\u00a0": " ", "\u2009": " ", "\u00ad": None})

# A hundred years, so that "11/21/26" is only one date.
_FIRST_DAY = datetime.datetime(1950, 1, 1)
_NUM_DAYS = 36_525

_UNITS = str.split(
    "area-hectare area-square-kilometer area-square-meter digital-gigabyte digital-megabyte duration-day "
    "duration-hour duration-minute duration-month duration-second duration-week duration-year energy-kilocalorie "
    "energy-kilowatt-hour length-centimeter length-foot length-inch length-kilometer length-meter length-mile "
    "length-nautical-mile mass-gram mass-kilogram mass-ounce mass-pound mass-tonne power-horsepower power-kilowatt "
    "speed-kilometer-per-hour speed-meter-per-second speed-mile-per-hour temperature-celsius "
    "temperature-fahrenheit volume-cubic-meter volume-gallon volume-liter volume-milliliter volume-tablespoon"
)
_COUNTRIES = str.split(
    "AT AU BE BR CA CH CN CZ DE DK EG ES FI FR GB GR HU IE IN IT JP KR MA MX NL NO NZ PL PT RU SE TR US ZA"
)
# Babel writes "CHF1,234.50" in English, without CLDR's blank, so only true signs are drawn as signs.
_SIGN_CURRENCIES = str.split("AUD BRL CAD CNY EUR GBP INR JPY KRW MXN USD")
_NAME_CURRENCIES = str.split("AUD CAD CHF CZK DKK EUR GBP INR JPY MXN NOK SEK TRY USD ZAR")
# Babel counts 365 days a year and 30 a month.
_SECONDS: dict[Literal["year", "month", "week", "day", "hour", "minute"], int] = {
    "year": 31_536_000,
    "month": 2_592_000,
    "week": 604_800,
    "day": 86_400,
    "hour": 3_600,
    "minute": 60,
}


def _below(rng: Random, n: int) -> int:
    """Draw from 0 … n - 1. Only Random.random() is guaranteed to give the same stream in later Pythons."""
    return int(rng.random() * n)


def _pick(rng: Random, options: Sequence[T]) -> T:
    return options[_below(rng, len(options))]


def _ascending(rng: Random, n: int) -> tuple[int, int]:
    """Draw two different numbers from 0 … n - 1, the smaller first."""
    first = _below(rng, n - 1)
    return first, first + 1 + _below(rng, n - 1 - first)


def _magnitude(rng: Random, max_digits: int) -> int:
    """Draw a positive integer, every number of digits being equally likely."""
    smallest: int = 10 ** _below(rng, max_digits)
    return smallest + _below(rng, 9 * smallest)


def _moment(rng: Random) -> datetime.datetime:
    return _FIRST_DAY + datetime.timedelta(days=_below(rng, _NUM_DAYS), seconds=_below(rng, 86_400))


def _both(render: Callable[[Locale], str]) -> tuple[str, str]:
    """Render one content in English and in German."""
    return render(_ENGLISH).translate(_PLAIN), render(_GERMAN).translate(_PLAIN)


def draw_date(rng: Random) -> Drawn:
    """Draw a day in one of CLDR's formats, from "11/21/26" to "Saturday, November 21, 2026"."""
    day, style = _moment(rng).date(), _pick(rng, ("short", "long", "full", "yMd", "yMMMd", "yMMMEd"))
    if style.startswith("y"):
        return *_both(lambda locale: dates.format_skeleton(style, day, locale=locale)), day.isoformat()
    return *_both(lambda locale: dates.format_date(day, style, locale)), day.isoformat()


def draw_time(rng: Random) -> Drawn:
    """Draw a time of the day, to the minute, to the second or in UTC."""
    time, style = _moment(rng).time(), _pick(rng, ("short", "medium", "long"))
    if style == "short":
        time = time.replace(second=0)
    return *_both(lambda locale: dates.format_time(time, style, locale=locale)), time.isoformat()


def draw_datetime(rng: Random) -> Drawn:
    """Draw a day and a time."""
    moment, style = _moment(rng), _pick(rng, ("short", "medium", "long", "full"))
    if style == "medium":
        return *_both(lambda locale: dates.format_datetime(moment, style, locale=locale)), moment.isoformat()
    moment = moment.replace(second=0)

    def render(locale: Locale) -> str:
        # Babel's own "long" and "full" add a time zone; the comma is CLDR's.
        time = dates.format_time(moment, "short", locale=locale)
        return f"{dates.format_date(moment, style, locale)}, {time}"

    return *_both(render), moment.isoformat()


def draw_interval(rng: Random) -> Drawn:
    """Draw days of one month, days of one year, months of one year or times of one day."""
    new_year = _FIRST_DAY.replace(year=_FIRST_DAY.year + _below(rng, 100))
    span = _pick(rng, ("days of a month", "days of a year", "months", "times"))
    if span == "times":
        start, end = (new_year + datetime.timedelta(minutes=n) for n in _ascending(rng, 1440))
        # German "hm" says AM and PM, so each side has its own skeleton.
        source, target = _both(
            lambda locale: dates.format_interval(start, end, "hm" if locale == _ENGLISH else "Hm", locale=locale)
        )
        return source, target, f"{start:%H:%M}/{end:%H:%M}"
    if span == "months":
        start, end = (new_year.replace(month=1 + n) for n in _ascending(rng, 12))
    elif span == "days of a year":
        start, end = (new_year + datetime.timedelta(days=n) for n in _ascending(rng, 365))
    else:
        month = 1 + _below(rng, 12)
        start, end = (new_year.replace(month=month, day=1 + n) for n in _ascending(rng, 28))
    skeleton, iso = ("yMMMM", "%Y-%m") if span == "months" else ("yMMMd", "%Y-%m-%d")
    source, target = _both(lambda locale: dates.format_interval(start, end, skeleton, locale=locale))
    return source, target, f"{start:{iso}}/{end:{iso}}"


def draw_duration(rng: Random) -> Drawn:
    """Draw two or three neighbouring units, each below the next larger one."""
    limits = (("week", 52), ("day", 7), ("hour", 24), ("minute", 60), ("second", 60))
    length = 2 + _below(rng, 2)
    first = _below(rng, len(limits) - length + 1)
    parts = [(1 + _below(rng, limit - 1), f"duration-{unit}") for unit, limit in limits[first : first + length]]

    def render(locale: Locale) -> str:
        return lists.format_list([units.format_unit(n, unit, locale=locale) for n, unit in parts], locale=locale)

    return *_both(render), " ".join(f"{n} {unit}" for n, unit in parts)


def draw_relative(rng: Random) -> Drawn:
    """Draw a time before or after now, in one unit."""
    unit, n, sign = _pick(rng, tuple(_SECONDS)), _magnitude(rng, 3), _pick(rng, (1, -1))
    delta = datetime.timedelta(seconds=sign * n * _SECONDS[unit])

    def render(locale: Locale) -> str:
        # An infinite threshold keeps Babel from turning 14 days into 2 weeks.
        return dates.format_timedelta(delta, unit, threshold=float("inf"), add_direction=True, locale=locale)

    return *_both(render), f"{n} duration-{unit}"


def draw_money(rng: Random) -> Drawn:
    """Draw an amount of a currency, with its sign or its name."""
    style: Literal["standard", "name"] = _pick(rng, ("standard", "name"))
    currency = _pick(rng, _SIGN_CURRENCIES if style == "standard" else _NAME_CURRENCIES)
    amount = Decimal(200 + _magnitude(rng, 8)).scaleb(-numbers.get_currency_precision(currency))

    def render(locale: Locale) -> str:
        return numbers.format_currency(amount, currency, locale=locale, format_type=style)

    return *_both(render), f"{amount} {currency}"


def draw_measure(rng: Random) -> Drawn:
    """Draw an amount of a unit, with up to two decimals."""
    amount, unit = Decimal(_magnitude(rng, 5)) / _pick(rng, (1, 10, 100)), _pick(rng, _UNITS)
    return *_both(lambda locale: units.format_unit(amount, unit, locale=locale)), f"{amount} {unit}"


def draw_worded_measure(rng: Random) -> Drawn:
    """Draw a measure whose number is spelled out."""
    n, unit = 2 + _below(rng, 998), _pick(rng, _UNITS)
    n += n % 100 == 1  # a final "eins" would have to agree with its noun
    source, target = _both(lambda locale: units.format_unit(n, unit, locale=locale).removeprefix(str(n)))
    return number_words.english(n) + source, number_words.german(n) + target, f"{n} {unit}"


def draw_number(rng: Random) -> Drawn:
    """Draw a percentage, millions to trillions or, rarely, a plain decimal, in which only comma and point differ."""
    amount = Decimal(20 + _magnitude(rng, 4)) + Decimal(1 + _below(rng, 9)) / _pick(rng, (10, 100))
    style = _pick(rng, ("plain", "percent", "percent", "compact", "compact"))
    if style == "plain":
        return *_both(lambda locale: numbers.format_decimal(amount, locale=locale)), str(amount)
    if style == "percent":
        ratio = amount / 100
        percent = _both(lambda locale: numbers.format_percent(ratio, locale=locale, decimal_quantization=False))
        return *percent, str(ratio)
    # From 2 up, because CLDR's German has "1 Milliarden", and below 1000, the next name.
    n = int((2 + amount % 998) * 10 ** _pick(rng, (6, 9, 12)))

    def render(locale: Locale) -> str:
        return numbers.format_compact_decimal(n, format_type="long", locale=locale, fraction_digits=2)

    return *_both(render), str(n)


def draw_number_words(rng: Random) -> Drawn:
    """Draw a number spelled out, below a hundred million."""
    n = _magnitude(rng, 6) * _pick(rng, (1, 1, 100))
    return number_words.english(n), number_words.german(n), str(n)


def draw_ordinal(rng: Random) -> Drawn:
    """Draw a place in order, in words or in digits."""
    n = 1 + _below(rng, 9_999)
    if _below(rng, 2):
        return number_words.english_ordinal(n), number_words.german_ordinal(n), str(n)
    suffix = {"one": "st", "two": "nd", "few": "rd", "other": "th"}[_ENGLISH.ordinal_form(n)]
    source, target = _both(lambda locale: numbers.format_decimal(n, locale=locale))
    return source + suffix, target + ".", str(n)


def draw_countries(rng: Random) -> Drawn:
    """Draw two or three different countries, joined by "and" or "or"."""
    others = list(_COUNTRIES)
    codes = [others.pop(_below(rng, len(others))) for _ in range(_pick(rng, (2, 3, 3)))]
    style: Literal["standard", "or"] = _pick(rng, ("standard", "or"))

    def render(locale: Locale) -> str:
        return lists.format_list([locale.territories[code] for code in codes], style, locale=locale)

    return *_both(render), " ".join(codes)
