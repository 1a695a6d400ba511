"""Model directories that somebody made to harm: seeded mutations of every file of four small ones, in one process.

A directory is imported whole, but for writing the run: it is read, or refused with one line. Half of the mutations of a
JSON file replace one of its values by one of another kind, or leave it out; the others change its bytes.

Command:  python -m tests.faults.hostile_models 5000 0
"""

import copy
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import jax

from jformer.errors import UserError
from jformer.tools.hf import convert, tensors
from jformer.tools.hf.write_model import export_model
from tests.faults.corruptions import held
from tests.faults.hostile import MUTATIONS
from tests.tools.hf import small_runs

WRONG: tuple[Any, ...] = (
    *(None, True, "", "x", "../../../etc/passwd", [], [None], ["x"], {}, {"x": 1}, 0, -1, 1, 0.5, -1e300, 1e300),
    *(2**31, 2**63, 10**30, [0], [2**40], [[]], {"content": 3}, {"content": None}, "🐈", "\0"),
)
CLEARED_EVERY = 100  # imports: JAX keeps what it traced


def models(folder: Path) -> Iterator[Path]:
    """Write the directories."""
    for name in ("bert", "marian", "bart", "t5"):
        run = getattr(small_runs, name)(folder / "runs" / name)
        shard_bytes = 4_000 if name == "bart" else tensors.SHARD_BYTES
        export_model(str(run), folder / name, shard_bytes=shard_bytes)
        yield folder / name


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of what a JSON file holds."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def replace_value(content: bytes, draw: Random) -> bytes:
    """Replace a value of a JSON file by one of another kind, or leave it out."""
    changed = copy.deepcopy(json.loads(content))
    container, key = draw.choice([*places(changed)])
    if draw.random() < 0.1:
        del container[key]
    else:
        container[key] = copy.deepcopy(draw.choice(WRONG))
    return json.dumps(changed).encode()


def mutate(path: Path, draw: Random) -> bytes:
    """Return the content of a file, changed one to three times."""
    content = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.5:
        return replace_value(content, draw)
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if changed:
            draw.choice(MUTATIONS)(changed, draw)
    return bytes(changed)


def end_of_import(directory: Path) -> str:
    """Import a directory, and return how that ended."""
    with mock.patch.object(convert, "write_run"), tempfile.TemporaryDirectory() as workdir:
        try:
            convert.import_model(directory, workdir, convert.Texts())
        except UserError as error:
            return "refused" if "\n" not in str(error) else f"refused in several lines: {error}"[:300]
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        return "read"


def attack(number: int, seed: int) -> dict[str, Any]:
    """Try so many mutations, all files in turn; return how they ended, what took longest, and how much was held."""
    ends, defects, longest = Counter[str](), [], 0.0
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        files = [file for model in models(Path(name)) for file in sorted(model.iterdir())]
        wholes = {file: end_of_import(file.parent) for file in files}
        assert set(wholes.values()) == {"read"}, wholes
        before = held()
        for i in range(number):
            file, draw = files[i % len(files)], Random(f"{seed} {i}")
            whole, began = file.read_bytes(), time.perf_counter()
            file.write_bytes(mutate(file, draw))
            ended = end_of_import(file.parent)
            seconds = time.perf_counter() - began
            ends[ended if ended in ("read", "refused") else "defect"] += 1
            if ended not in ("read", "refused"):
                defects.append(f"{i}: {file.parent.name}/{file.name}: {ended}")
            file.write_bytes(whole)
            longest = max(longest, seconds)
            if i % CLEARED_EVERY == 0:
                jax.clear_caches()
        grown = held() - before
    return {"ends": dict(ends), "defects": defects, "grown": grown, "longest": longest, "files": len(files)}


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]), int(sys.argv[2])), indent=1))
