"""How do time, memory and disk grow with the pairs of a corpus, and does preparation survive kills?

Pairs are generated: Zipfian words, log-normal lengths. One process opens their text, learns a vocabulary and makes the
arrays; two others open what is there and make a batch, in buckets and in packed rows. Seconds are the processor's, of
all processes, and beside them those of the clock; memory is the most that the process holds, JAX imported.
With --kills, preparation is killed that often at random moments, and its arrays are compared with those made in peace.

Command:  python -m experiments.speed.preparation [--pairs=100000,1000000] [--kills=20] [--smoke]
"""

import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, resident, smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.corpus import open_corpus
from jformer.data.pipeline import make_batches
from jformer.data.sources import open_split
from jformer.data.vocabularies import learn_tokenizers, load_tokenizers
from jformer.tasks.build import build_task

PAIRS = flags.DEFINE_list("pairs", ["100000", "1000000"], "How many, one after the other.")
KILLS = flags.DEFINE_integer("kills", 0, "Of the preparation of the first of them.")
SEED = flags.DEFINE_integer("seed", 0, "Of when.")
STAGE = flags.DEFINE_enum("stage", "", ["", "prepare", "buckets", "packed"], "Do this and print its figures.")
FOLDER = flags.DEFINE_string("folder", "", "Of text, tokenizers and arrays.")

WORDS, MEAN, SPREAD = 200_000, 3.0, 0.6  # different ones; of the logarithm of a sentence's length in words
AT_ONCE = 100_000  # pairs that are generated


def write_text(folder: Path, pairs: int) -> None:
    """Write both sides of a corpus."""
    rng = np.random.default_rng(0)
    letters, sizes = rng.integers(ord("a"), ord("z") + 1, 12 * WORDS), rng.integers(2, 12, WORDS)
    words = np.array([bytes(letters[12 * i : 12 * i + size].tolist()).decode() for i, size in enumerate(sizes)], object)
    often = np.cumsum(1 / np.arange(1, WORDS + 1))
    with (folder / "train.en").open("w") as source, (folder / "train.de").open("w") as target:
        for start in range(0, pairs, AT_ONCE):
            count = min(AT_ONCE, pairs - start)
            lengths = np.clip(np.rint(rng.lognormal(MEAN, SPREAD, count)), 1, 120).astype(np.int64)
            ids = np.searchsorted(often, rng.random(lengths.sum()) * often[-1])
            for file, side in ((source, ids), (target, (ids * 7919 + 1) % WORDS)):
                file.writelines(" ".join(line) + "\n" for line in _lines(words[side].tolist(), lengths.tolist()))


def _lines(words: list[str], lengths: list[int]) -> Iterator[list[str]]:
    end = 0
    for length in lengths:
        start, end = end, end + length
        yield words[start:end]


def configured(folder: Path, batching: str) -> Config:
    """Return the options of the run."""
    settings = default_config("transformer_base")
    settings.data.update(dir=str(folder), vocab_size=8_000, batching=batching, cache_dir=str(folder / "cache"))
    settings.data.update(max_source_length=128, max_target_length=128, tokens_per_update=25_000)
    return resolve(settings)


def stage(folder: Path, name: str) -> None:
    """Do a stage and print seconds by what took them, and MiB."""
    config = configured(folder, "packed" if name == "packed" else "buckets")
    task, seconds, directory = build_task(config), dict[str, list[float]](), folder / "tokenizer"
    began = clocks()

    def lap(what: str) -> None:
        nonlocal began
        seconds[what], began = (clocks() - began).tolist(), clocks()

    split = open_split(config.data, "train")
    lap("open")
    if name == "prepare" and not directory.exists():
        learn_tokenizers(directory, config.data, [split], task.vocabularies)
        lap("learn")
    tokenizers = load_tokenizers(directory)
    corpus = open_corpus(split, task.encoder(*tokenizers), config.data.cache_dir)
    lap("arrays")
    if name != "prepare":
        batches = make_batches([corpus], [1.0], config.data, 0, task.features(*tokenizers))
        assert len(batches)
        lap("plan")
        batches[0]
        lap("batch")
    print(json.dumps({"seconds": seconds, "held": resident(field="VmHWM")}))


def clocks() -> np.ndarray:
    """Return the seconds of the processor, of this process and of those that have ended, and of the clock."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return np.array([sum(each.ru_utime + each.ru_stime for each in usages), time.perf_counter()])


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a stage in a process of its own."""
    command = [sys.executable, "-m", "experiments.speed.preparation", f"--stage={name}", f"--folder={folder}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def size_of(folder: Path) -> float:
    """Return the MiB of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def measure(folder: Path, pairs: int) -> None:
    """Print the rows of a corpus."""
    write_text(folder, pairs)
    text = size_of(folder)
    for name in ("prepare", "buckets", "packed"):
        found = json.loads(start(folder, name).communicate()[0])
        each = ", ".join(f"{what} {used:.2f} ({clock:.2f})" for what, (used, clock) in found["seconds"].items())
        per = 1e6 * sum(used for used, _ in found["seconds"].values()) / pairs
        sizes = f"text {text:,.0f}, arrays {size_of(folder / 'cache'):,.0f} MiB"
        print(
            f"{pairs:>11,} {name:<8}{each} s; {per:.1f} us a pair; held {found['held']:,.0f} MiB; {sizes}", flush=True
        )


def kill(folder: Path, draw: random.Random) -> None:
    """Prepare again, killed at random moments; print whether the arrays are the same."""
    whole = arrays(folder)
    cache, times, kept = folder / "cache", list[float](), 0
    shutil.rmtree(cache)
    began = time.perf_counter()
    finish(folder)
    undisturbed = time.perf_counter() - began
    for number in range(KILLS.value):
        if not any(cache.glob("*.tmp")):
            shutil.rmtree(cache, ignore_errors=True)
        process = start(folder, "prepare")
        try:
            process.wait(draw.uniform(undisturbed / 8, undisturbed / 2))
        except subprocess.TimeoutExpired:
            process.kill()
            times.append(number)
        process.communicate()
        kept += len(list(cache.glob("*.tmp/*.npz")))
    finish(folder)
    same = arrays(folder) == whole
    print(f"{len(times)} kills, {kept} blocks kept over them in all; arrays {'equal' if same else 'NOT EQUAL'}")


def finish(folder: Path) -> None:
    """Prepare to the end."""
    process = start(folder, "prepare")
    process.communicate()
    if process.returncode:
        raise RuntimeError("preparation failed")


def arrays(folder: Path) -> dict[str, bytes]:
    """Return the files of the arrays."""
    return {path.name: path.read_bytes() for path in (folder / "cache").glob("*/*.npy")}


def main(_: Sequence[str]) -> None:
    """Print the rows."""
    smoke_sizes(pairs=["2000"], kills=1)
    if STAGE.value:
        stage(Path(FOLDER.value), STAGE.value)
        return
    print(f"{commit()}, {processor_name()}, {len(os.sched_getaffinity(0))} cores")
    for number, pairs in zip(itertools.count(), map(int, PAIRS.value)):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), pairs)
            if KILLS.value and not number:
                kill(Path(folder), random.Random(SEED.value))


if __name__ == "__main__":
    app.run(main)
