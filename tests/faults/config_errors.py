"""Every key of a config with a typo, a value of another type, NaN, infinity, or a number below all that make sense."""

from collections.abc import Iterator
from typing import Any

from jformer.config import default_config, resolve
from jformer.config.overrides import override
from jformer.errors import UserError
from tests.config.test_config import DEFAULTS, WRONG, typos, with_values
from tests.faults.runs import Runs
from tests.faults.verdicts import Verdict, refusal

BELOW = -(2**31)


def mistakes() -> Iterator[tuple[str, Any]]:
    """Yield keys and what they are set to: for a key that is none, nothing."""
    yield from ((typo, None) for typo in typos())
    for key, default in DEFAULTS.items():
        yield from ((key, value) for value in WRONG[type(default)])
        if type(default) in (int, float):
            yield key, type(default)(BELOW)


def mistake(runs: Runs, cases: list[tuple[str, Any]], number: int) -> tuple[str, Verdict] | None:
    """Set one key; None where there is none left."""
    if number >= len(cases):
        return None
    key, value = cases[number]
    fault = f"{key}={value!r}"
    try:
        if value is None and key not in DEFAULTS:
            override(default_config(), [f"--config.{key}=1"])
        else:
            resolve(with_values({key: value}))
    except UserError as error:
        return fault, refusal(str(error), [key])
    return fault, Verdict("accepted", "")
