"""The page of options: a row for each field of the config's dataclasses, with what they and their checks say of it.

Nothing is written here twice: defaults are those of the dataclasses, words are their comments, and choices are those
that the refusal of a wrong one names.
"""

import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from jformer.config.checks import check
from jformer.config.options import Config
from jformer.errors import UserError

HEADINGS = ("key", "default", "choices", "what it is, and why", "source")
NAME = r"(?:[A-Z][\w-]+(?:,? (?:and )?[A-Z][\w-]+)*(?: et al\.)?)"
PAPER = re.compile(rf"{NAME} (?:\d{{4}}|\(\d{{4}}\))")
# Options each of whose choices is defined in a line of its own, with its paper: key → the file below jformer/.
DEFINED = {
    "model.norm": "models/layers/transformer.py",
    "model.positions": "models/layers/positions.py",
    "model.activation": "models/layers/feed_forward.py",
    "model.init": "models/layers/initializers.py",
    "model.recurrent.cell": "models/layers/recurrent_cells.py",
    "model.recurrent.attention": "models/layers/alignment.py",
    "optim.optimizer": "training/optim.py",
    "optim.schedule": "training/optim.py",
}
PLACE = r"((?:appendix|section|equation|algorithm|Table) [\w.]*\w)"

ABOUT = """Set one with `--config.KEY=VALUE`, or in a config file with `config.KEY = VALUE`. What has no source is our
own choice, for the reason that stands beside it; why larger ones were made is in the [decisions](decisions/)."""


def options_page() -> str:
    """Return a table of every option for each section, after what the section says of itself."""
    parts = ["# Options", ABOUT]
    for prefix, section in sections(Config()):
        rows = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
        about, said = inspect.cleandoc(type(section).__doc__ or ""), comments(type(section))
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if not dataclasses.is_dataclass(value):
                key, words = prefix + field.name, said.get(field.name, "")
                offered = choices(key, value)
                papers = of_choices(key, offered) or source(words, about)
                cells = (f"`{key}`", f"`{value!r}`", offered, words, papers)
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [f"## {prefix.rstrip('.') or 'config'}", about, "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def sections(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a dataclass of options and all within it, each with what its keys begin with."""
    yield prefix, section
    for field in dataclasses.fields(section):
        if dataclasses.is_dataclass(value := getattr(section, field.name)):
            yield from sections(value, f"{prefix}{field.name}.")


def comments(section: type) -> dict[str, str]:
    """Return what is said of each field of a dataclass: comments in the lines above it, then that behind it."""
    said: dict[str, str] = {}
    for base in reversed(section.__mro__[:-1]):
        above: list[str] = []
        name = ""  # of the field that comments behind it are of
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(base)).readline):
            alone = token.line.strip().startswith("#")
            if token.type == tokenize.COMMENT and alone:
                above.append(token.string.strip("# "))
            elif token.type == tokenize.COMMENT and name:
                said[name] = f"{said[name]} {token.string.strip('# ')}".strip()
            elif token.type == tokenize.NAME and re.match(r"    \w+\s*:", token.line) and token.start[1] == 4:
                name, said[token.string], above = token.string, " ".join(above), []
            elif not token.line.strip():
                above = []
    return said


def choices(key: str, default: Any) -> str:
    """Return the values that an option may have, where they are few: those that its check offers instead of another.

    They are those of a config that is the default elsewhere; which scores train and evaluate know depends on the task.
    """
    if isinstance(default, bool):
        return "`True`, `False`"
    if (
        key == "data.mixture"
        or not isinstance(default, str | tuple)
        or not all(isinstance(each, str) for each in default)
    ):
        return ""
    try:
        check(changed(Config(), key.split("."), "?" if isinstance(default, str) else ("?",)))
    except UserError as refusal:
        offered = str(refusal).partition("choose one of: ")[2].partition(", or name ")[0]
        names = [name.strip("'") for name in offered.split(", ")] if offered else []
        several = "some of: " if names and isinstance(default, tuple) else ""
        return several + ", ".join(f"`{name!r}`" for name in names)
    return ""


def changed(section: Any, path: list[str], value: Any) -> Any:
    """Return a dataclass with another value of one field, or of a field of a field."""
    first, *rest = path
    return dataclasses.replace(section, **{first: changed(getattr(section, first), rest, value) if rest else value})


def of_choices(key: str, offered: str) -> str:
    """Return the papers of the choices that are offered, each behind its name; "" where their key is not in DEFINED."""
    if key not in DEFINED:
        return ""
    lines = files("jformer").joinpath(DEFINED[key]).read_text("utf-8").splitlines()
    found = [re.match(rf' +"?(\w+)"?:? .*?({PAPER.pattern}(?:, {PLACE})?)', line) for line in lines]
    return "; ".join(f"{match[1]}: {match[2]}" for match in found if match and f"`{match[1]!r}`" in offered)


def source(words: str, about: str) -> str:
    """Return the papers that are named in the words on an option; a place alone is one of the paper of its section."""
    papers = re.findall(rf"({PAPER.pattern}(?:, {PLACE})?)", words)
    if papers:
        return "; ".join(dict.fromkeys(paper for paper, _ in papers))
    place, of = re.search(rf"\({PLACE}\)", words), PAPER.search(about)
    return f"{of[0]}, {place[1]}" if place and of else ""
