"""Values that must be the same in all processes of a run, and the error for those that differ."""

import hashlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from jformer.errors import UserError

LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "sentencepiece", "sacrebleu")
PACKAGE = Path(__file__).parents[2]
MOST_LISTED = 4  # values, and processes of a value, in a line
LOCAL = ("config.data.cache_dir", "config.data.dir")  # may differ between machines: the texts are compared
STAMP = "_CHECKPOINT_METADATA"  # a file of a checkpoint that holds the time of writing


def software() -> dict[str, str]:
    """Return the versions of Python and libraries, and a digest of our own source."""
    return {**library_versions(), "jformer's source": _digest(PACKAGE, PACKAGE.rglob("*.py"))}


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that results depend on."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def code_version(package: Path = PACKAGE) -> str:
    """Return the commit of the package's git clone, with "-dirty" for changed files; else the installed version."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", package, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # another project's clone may hold our installation
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")
    except (OSError, subprocess.CalledProcessError):
        return version("jformer")


def saved_run(workdir: Path, is_step: Callable[[str], bool]) -> dict[str, str]:
    """Return digests that distinguish a saved run from another one and from an older copy of it.

    `is_step` recognizes the folder of a step by its name: `storage.is_step`, which this room may not import.
    """
    config = workdir / "config.json"
    files = [*[config] * config.exists(), *_inside(workdir / "tokenizer")]
    steps = [path for path in _inside(workdir / "checkpoints") if is_step(path.name)]
    stamps = [path / STAMP for path in steps if (path / STAMP).exists()]
    last = sorted(stamps, key=lambda path: int(path.parent.name))[-1:]
    return {
        f"the config and tokenizers of {workdir}": _digest(workdir, files),
        f"the last checkpoint of {workdir}": " ".join([*(path.parent.name for path in last), _digest(workdir, last)]),
    }


def _inside(folder: Path) -> list[Path]:
    """Return what a folder holds; `glob` would treat special characters in a run's path as a pattern."""
    return [*folder.iterdir()] if folder.is_dir() else []


def refuse_differences(fields: Sequence[Mapping[str, object]], names: Sequence[str]) -> None:
    """Raise UserError for the first field that differs between processes, with its values and their processes."""
    for field in dict.fromkeys(field for each in fields for field in each):
        if field in LOCAL:
            continue
        groups: dict[str, list[int]] = {}
        for process, each in enumerate(fields):
            groups.setdefault(repr(each.get(field)), []).append(process)
        if len(groups) > 1:
            listed = "; ".join(
                f"{value} on {_listed(members, names)}" for value, members in [*groups.items()][:MOST_LISTED]
            )
            raise UserError(f"the processes differ in {field}: {listed}; start the same command, code and data for all")


def _digest(folder: Path, paths: Iterable[Path]) -> str:
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return content.hexdigest()[:16]


def _listed(processes: Sequence[int], names: Sequence[str]) -> str:
    listed = ", ".join(f"{i} ({names[i]})" for i in processes[:MOST_LISTED]) + (
        ", …" if len(processes) > MOST_LISTED else ""
    )
    return f"process {listed}"
