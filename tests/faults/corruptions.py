"""Damage to one file of a run, and what readers of it make of that, in this process.

A reader gets what was saved, to the last bit, of the newest step or of an older one and says so; or it refuses in one
line that names the file. What a run does after it was read is left to kills.py.
"""

import contextlib
import hashlib
import io
import itertools
import json
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from jformer import trainer
from jformer.config.options import Config
from jformer.data.corpus import Corpus
from jformer.errors import UserError
from jformer.evaluation import records
from jformer.inference.restore import restore
from jformer.training.corpora import Data
from tests.faults.verdicts import Verdict, refusal

MEMORY = 1 << 28  # bytes that reading a damaged file may add to the most that was held before


class Kind(NamedTuple):
    """Files that are damaged alike: patterns below the run. STEP is the newest step, DATA its cache of tokens."""

    patterns: tuple[str, ...]
    readers: tuple[str, ...]
    names: tuple[str, ...]  # of which one stands in what is said
    cache: bool = False  # they lie below the cache of tokens instead


class Read(NamedTuple):
    """What a reader got: the step and bits of the parameters, and figures where it reads some."""

    step: int
    bits: str
    figures: dict[str, Any]


STEP = "checkpoints/STEP"
KINDS = {
    "arrays": Kind((f"{STEP}/*/d/*", f"{STEP}/*/*/d/*"), ("train", "load"), (STEP,)),
    "metadata": Kind((f"{STEP}/_*", f"{STEP}/*/*", f"{STEP}/*/*/*"), ("train", "load"), (STEP,)),
    "manifest": Kind((f"{STEP}/manifest/*",), ("train", "load"), (STEP,)),
    "config.json": Kind(("config.json",), ("train", "load", "figures"), ("config.json",)),
    "tokenizer": Kind(("tokenizer/*",), ("train", "load"), ("tokenizer",)),
    "token cache": Kind(("DATA/*",), ("train",), ("tokenizing",), cache=True),
    "metrics.jsonl": Kind(("metrics.jsonl",), ("figures", "train"), ("metrics.jsonl",)),
    "results.json": Kind(("results.json",), ("figures",), ("results.json",)),
}
FALLING_BACK = ("arrays", "metadata", "manifest")  # there is an older step


class Damaged:
    """A run and its cache that are copied, damaged and read, again and again."""

    def __init__(self, base: Path, cache: Path, config: Config, folder: Path) -> None:
        """Read the whole run, and without its newest step."""
        self._base, self._cache, self.config, self._folder = base, cache, config, folder
        steps = sorted((int(path.name) for path in (base / "checkpoints").iterdir()), reverse=True)
        self.newest, self.expected = steps[0], {}
        for count, name in itertools.product(range(2), READERS):
            workdir, _ = self.copies()
            for step in steps[:count]:
                shutil.rmtree(workdir / "checkpoints" / str(step))
            self.expected[name, steps[count]] = READERS[name](self.config, workdir)
        manifest = json.loads((base / "checkpoints" / str(self.newest) / "manifest" / "metadata").read_bytes())
        self._words = {"STEP": str(self.newest), "DATA": manifest["progress"]["data"][0]}

    def copies(self) -> tuple[Path, Path]:
        """Return a fresh copy of the run, and of the cache."""
        for name, source in (("run", self._base), ("cache", self._cache)):
            shutil.rmtree(self._folder / name, ignore_errors=True)
            shutil.copytree(source, self._folder / name, ignore=shutil.ignore_patterns("tensorboard", "compiled"))
        return self._folder / "run", self._folder / "cache"

    def cases(self, kinds: Sequence[str], numbers: Iterable[int]) -> Iterator[tuple[str, Verdict]]:
        """Damage files of some kinds."""
        for name, number in itertools.product(kinds, numbers):
            yield self.corrupt(Random(f"{name} {number}"), list(KINDS).index(name))

    def corrupt(self, draw: Random, number: int) -> tuple[str, Verdict]:
        """Damage a file that is drawn, of the kind whose turn it is, and let a reader that is drawn have it."""
        name = list(KINDS)[number % len(KINDS)]
        kind, (workdir, cache) = KINDS[name], self.copies()
        folder = cache if kind.cache else workdir
        patterns, names = ([self._filled(word) for word in words] for words in (kind.patterns, kind.names))
        files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
        file = draw.choices(files, [file.stat().st_size + 1 for file in files])[0]
        fault = f"{name}: {damage(file, draw)} {file.relative_to(folder)}"
        reader = draw.choice(kind.readers)
        verdict = self.judge(reader, workdir, names)
        if verdict.outcome == "refused" and name in FALLING_BACK:
            verdict = Verdict("no older step was taken", verdict.said)
        return f"{fault}, {reader}", verdict

    def _filled(self, word: str) -> str:
        for name, text in self._words.items():
            word = word.replace(name, text)
        return word

    def judge(self, reader: str, workdir: Path, names: list[str]) -> Verdict:
        """Let a reader have a run that is damaged."""
        said, before = io.StringIO(), held()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                found = READERS[reader](self.config, workdir)
        except UserError as error:
            return refusal(str(error), names)
        except Exception as error:
            return Verdict("traceback", f"{type(error).__name__}: {error}"[:300])
        if held() - before > MEMORY:
            return Verdict(f"held {(held() - before) >> 20} MiB more", "")
        notes = " ".join(line for line in said.getvalue().splitlines() if "damaged" in line)
        return self._compare(reader, found, notes)

    def _compare(self, reader: str, found: Read, notes: str) -> Verdict:
        """Tell whether what was read is what was saved."""
        expected = self.expected.get((reader, found.step))
        if expected is None or found.bits != expected.bits or (found.step < self.newest and not notes):
            return Verdict("silent: other parameters", notes)
        whole = {**expected.figures, "rows": found.figures["rows"]} if "metrics.jsonl" in notes else expected.figures
        if found.figures == whole:
            return Verdict("recovered" if notes else "unharmed", notes)
        if reader == "figures" and self._is_earlier(found.figures, expected.figures):
            return Verdict("as a run still going on", "")
        return Verdict("silent: other figures", notes)

    def _is_earlier(self, found: dict[str, Any], whole: dict[str, Any]) -> bool:
        """Tell whether figures may be those of the same run before it was done: fewer rows, no scores yet."""
        same = all(found[name] == whole[name] for name in found.keys() & whole.keys() - {"rows"})
        return same and {"config", "rows"} <= found.keys() and found["rows"] == whole["rows"][: len(found["rows"])]


def flip(content: bytearray, draw: Random) -> None:
    """Flip one bit."""
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def blank(content: bytearray, draw: Random) -> None:
    """Fill a piece with zeros, as a page that never reached the disk."""
    begin = draw.randrange(len(content))
    size = min(draw.choice((1, 16, 512, 4096)), len(content) - begin)
    content[begin : begin + size] = bytes(size)


def swap(content: bytearray, draw: Random) -> None:
    """Swap two pieces of the same size."""
    size = max(1, min(64, len(content) // 4))
    a, b = (draw.randrange(len(content) - size + 1) for _ in range(2))
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]


def cut(content: bytearray, draw: Random) -> None:
    """Drop the end."""
    del content[draw.randrange(len(content)) :]


def lengthen(content: bytearray, draw: Random) -> None:
    """Insert random bytes."""
    place = draw.randrange(len(content) + 1)
    content[place:place] = draw.randbytes(draw.choice((1, 8, 1000)))


def digit(content: bytearray, draw: Random) -> None:
    """Change one digit, which leaves JSON what it is; flip a bit where there is none."""
    places = [i for i, byte in enumerate(content) if byte in b"0123456789"]
    if not places:
        return flip(content, draw)
    place = draw.choice(places)
    content[place] = draw.choice([byte for byte in b"123456789" if byte != content[place]])
    return None


CHANGES: tuple[Callable[[bytearray, Random], None], ...] = (flip, flip, flip, digit, digit, blank, swap, cut, lengthen)


def damage(path: Path, draw: Random) -> str:
    """Damage a file in a way that is drawn, and return it in words. What it holds is other bytes then, or nothing."""
    content = path.read_bytes()
    if draw.random() < 0.15 or not content:
        if draw.random() < 0.5:
            path.unlink()
            return "delete"
        path.write_bytes(b"" if content else b"x")
        return "empty"
    change = draw.choice(CHANGES)
    changed = bytearray(content)
    while changed == content:
        change(changed, draw)
    path.write_bytes(changed)
    return change.__name__


def train(config: Config, workdir: Path) -> Read:
    """Open the run to go on with it, as far as the first update."""
    texts: list[Corpus] = []
    found: dict[str, Any] = {}

    def open_data(*arguments: Any) -> Data:
        data = trainer_open_data(*arguments)
        texts.extend(data.texts.values())
        return data

    trainer_open_data = trainer.open_data
    with mock.patch.object(trainer, "open_data", open_data):
        trainer.train(config, workdir, lambda **arguments: found.update(arguments))
    tokens = [
        np.asarray(values).tolist() for text in texts for side in (text.source, text.target) for values in side_of(side)
    ]
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
    return Read(found["progress"].step, bits(found["state"]), {"rows": records.rows(workdir), "tokens": digest})


def side_of(tokens: Any) -> Iterator[Any]:
    """Yield the arrays of one side of a corpus."""
    yield from (tokens.values, tokens.offsets)


def load(config: Config, workdir: Path) -> Read:
    """Read the run to answer with it; config.json is its only config."""
    found = restore(workdir)
    vocabulary = [tokenizer.tokens for tokenizer in found.tokenizers]
    return Read(found.steps[0], bits(found.params), {"config": repr(found.config), "vocabulary": vocabulary})


def figures(config: Config, workdir: Path) -> Read:
    """Read config, rows and scores as a comparison of runs does."""
    found = {"config": repr(records.saved_config(workdir)), "rows": records.rows(workdir)}
    newest = max(int(path.name) for path in (workdir / "checkpoints").iterdir())
    return Read(newest, "", {**found, **records.results(workdir)})


READERS: dict[str, Callable[[Config, Path], Read]] = {"train": train, "load": load, "figures": figures}


def bits(tree: Any) -> str:
    """Return a digest of all arrays."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def held() -> int:
    """Return the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
