"""Every key of a config with a typo, a value of another type, NaN, infinity, a number below all, or out of relation.

A refusal is one line that holds the key, the value, the nearest name where a name is wrong, and what would do instead,
in less than three seconds.
"""

import time
from collections.abc import Iterator
from typing import Any

from jformer.config import default_config, resolve
from jformer.config.config_files import override
from jformer.errors import UserError
from tests.config.test_config import DEFAULTS, typos, with_values, wrong_values
from tests.faults.runs import Runs
from tests.faults.verdicts import Verdict, refusal

BELOW = -(2**31)
SECONDS = 3.0
REMEDIES = (
    "must",
    "choose",
    "did you mean",
    "set ",
    "needs",
    "lower",
    "raise",
    "give ",
    "use ",
    "name ",
    "only",
    "leave",
)
NEAREST = "did you mean "
TYPOS = typos()
RELATED: dict[str, dict[str, tuple[Any, ...]]] = {  # what is set → another key, and values that cannot be beside it
    "model.d_model=512": {"model.num_heads": (3, 5, 7, 9, 11, 13, 15, 100, 513)},
    "model.num_heads=8": {"model.num_kv_heads": (3, 5, 6, 7, 9, 16)},
    "decode.beam_size=4": {"decode.n_best": (5, 6, 8, 100), "decode.beam_groups": (3, 5, 8)},
    "optim.schedule=linear": {"optim.warmup": (100_001.0, 200_000.0, 1e6)},
    "train.checkpoint_every=10": {"train.eval_every": (1, 3, 7, 15, 25, 99)},
    "task=lm": {"model.family": ("encdec", "encoder", "vit")},
    "task=translate": {"model.family": ("decoder", "encoder", "vit")},
}


def mistakes() -> Iterator[tuple[str, Any, str]]:
    """Yield keys, what they are set to, and what is set beside them; for a key that is none, nothing."""
    yield from ((typo, None, "") for typo in TYPOS)
    for key, default in DEFAULTS.items():
        yield from ((key, value, "") for value in wrong_values(default))
        if type(default) in (int, float):
            yield key, type(default)(BELOW), ""
    for beside, others in RELATED.items():
        yield from ((key, value, beside) for key, values in others.items() for value in values)


def mistake(runs: Runs, cases: list[tuple[str, Any, str]], number: int) -> tuple[str, Verdict] | None:
    """Set one key; None where there is none left."""
    return judge(*cases[number]) if number < len(cases) else None


def judge(key: str, value: Any, beside: str) -> tuple[str, Verdict]:
    """Set one key, and tell whether that is refused as it should be."""
    typo, began = value is None and key not in DEFAULTS, time.monotonic()
    fault = f"{key}={value!r}{f' beside {beside}' if beside else ''}"
    try:
        if typo:
            override(default_config(), [f"--config.{key}=1"])
        else:
            other, _, given = beside.partition("=")
            resolve(
                with_values(
                    {other: int(given) if given.isdecimal() else given} | {key: value} if beside else {key: value}
                )
            )
    except UserError as error:
        verdict = refusal(str(error), [key])
        if verdict.outcome == "refused":
            return fault, told(key, value, str(error), typo, time.monotonic() - began)
        return fault, verdict
    return fault, Verdict("accepted", "")


def told(key: str, value: Any, line: str, typo: bool, seconds: float) -> Verdict:
    """Tell what a line lacks that refuses a key."""
    if seconds > SECONDS:
        return Verdict("refused late", f"{seconds:.1f} s: {line}")
    if typo:
        near = any(NEAREST + name in line for whole in TYPOS[key] for name in (whole, whole.rpartition(".")[2]))
        return Verdict("refused" if near or "choose one of" in line else "refused without the nearest name", line)
    shown = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    if not any(text in line for text in (repr(value), str(value), repr(shown))):
        return Verdict("refused without the value", line)
    return Verdict("refused" if any(word in line for word in REMEDIES) else "refused without a remedy", line)
