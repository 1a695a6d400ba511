"""How do time, memory and disk grow with the pairs of a corpus, and does preparation survive kills?

Pairs are generated: Zipfian words, log-normal lengths. One process opens their text, learns a vocabulary and makes the
arrays; two others open what is there and make a batch, in buckets and in packed rows. Seconds are CPU time, of all
processes, and beside them those of the clock; memory is the peak of the process, JAX imported, with and without pages
of files, which the system can reclaim. With --kills, preparation is killed that often at random moments, and its arrays
are compared with those made without kills. With --plan, only the lengths of that many pairs are made.

Command:  python -m experiments.speed.preparation [--pairs=100000,1000000] [--kills=20] [--keep=DIR] [--smoke]
          python -m experiments.speed.preparation --plan=40000000
"""

import contextlib
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
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from experiments.measure import ROOT, commit, processor_name, resident, smoke_sizes
from jformer.config import default_config, resolve
from jformer.config.options import Config
from jformer.data.corpus import open_corpus
from jformer.data.pipeline import make_batches
from jformer.data.preparation import PAIRS as HASHES
from jformer.data.sources import open_split
from jformer.data.vocabularies import learn_tokenizers, load_tokenizers
from jformer.integrity import seal
from jformer.tasks.build import build_task

PAIRS = flags.DEFINE_list("pairs", ["100000", "1000000"], "Pairs of each corpus, one after the other.")
KILLS = flags.DEFINE_integer("kills", 0, "Kills during the preparation of the first corpus.")
SEED = flags.DEFINE_integer("seed", 0, "Seed for when to kill.")
PLAN = flags.DEFINE_integer("plan", 0, "Open and plan this many pairs, of which only the lengths are made.")
KEEP = flags.DEFINE_string("keep", "", "A folder that keeps text and arrays for later runs.")
STAGE = flags.DEFINE_enum("stage", "", ["", "prepare", "buckets", "packed"], "Run this stage and print its figures.")
FOLDER = flags.DEFINE_string("folder", "", "Folder of text, tokenizers and arrays.")

WORDS, MEAN, SPREAD = 200_000, 3.0, 0.6  # different ones; of the logarithm of a sentence's length in words
AT_ONCE = 100_000  # pairs that are generated


def write_text(folder: Path, pairs: int) -> None:
    """Write both sides of a corpus, unless they are there."""
    if (folder / "train.de").exists():
        return
    rng = np.random.default_rng(0)
    letters, sizes = rng.integers(ord("a"), ord("z") + 1, 12 * WORDS), rng.integers(2, 12, WORDS)
    words = np.where(np.arange(12) < sizes[:, None], letters.reshape(WORDS, 12), 0).astype(np.uint8)
    words[:, -1] = ord(" ")
    often = np.cumsum(1 / np.arange(1, WORDS + 1))
    with (folder / "train.en").open("wb") as source, (folder / "target").open("wb") as target:
        for start in range(0, pairs, AT_ONCE):
            count = min(AT_ONCE, pairs - start)
            lengths = np.clip(np.rint(rng.lognormal(MEAN, SPREAD, count)), 1, 120).astype(np.int64)
            ids = np.searchsorted(often, rng.random(lengths.sum()) * often[-1])
            for file, side in ((source, ids), (target, (ids * 7919 + 1) % WORDS)):
                text = words[side]
                text[np.cumsum(lengths) - 1, -1] = ord("\n")
                file.write(text[text > 0].tobytes())
    (folder / "target").rename(folder / "train.de")


def configured(folder: Path, batching: str) -> Config:
    """Return the options of the run."""
    settings = default_config("transformer_base")
    settings.data.update(dir=str(folder), vocab_size=8_000, batching=batching, cache_dir=str(folder / "cache"))
    settings.data.update(max_source_length=128, max_target_length=128, tokens_per_update=25_000)
    return resolve(settings)


def stage(folder: Path, name: str) -> None:
    """Run a stage and print its seconds, part by part, and MiB."""
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
        batches[len(batches)]
        lap("next epoch")
    print(json.dumps({"seconds": seconds, "held": resident(field="VmHWM")}))


def make_lengths(cache: Path, pairs: int) -> None:
    """Replace the arrays of a cache by those of a corpus of given size; tokens are zeros that take no room on disk."""
    rng, (folder,) = np.random.default_rng(0), (path for path in cache.iterdir() if path.is_dir())
    source = np.clip(np.rint(rng.lognormal(3.11, 0.61, pairs)), 2, 128)
    target = np.clip(np.rint(source * rng.lognormal(0.02, 0.2, pairs)), 2, 128)
    for side, lengths in {"source": source, "target": target}.items():
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        np.save(folder / f"{side}.offsets.npy", offsets)
        np.lib.format.open_memmap(folder / f"{side}.values.npy", "w+", np.uint16, (int(offsets[-1]),))
    np.lib.format.open_memmap(folder / HASHES, "w+", np.uint64, (pairs,))
    seal(folder)


def clocks() -> np.ndarray:
    """Return the seconds of the processor, of this process and of those that have ended, and of the clock."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return np.array([sum(each.ru_utime + each.ru_stime for each in usages), time.perf_counter()])


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a stage in a process of its own."""
    command = [sys.executable, "-m", "experiments.speed.preparation", f"--stage={name}", f"--folder={folder}"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def size_of(folder: Path, pattern: str) -> float:
    """Return the MiB of the files in a folder that match a pattern."""
    return sum(path.stat().st_size for path in folder.glob(pattern)) / 2**20


def measure(folder: Path, pairs: int) -> None:
    """Print the rows of a corpus."""
    if PLAN.value:
        write_text(folder, pairs=2_000)
        if not (folder / "cache").exists():
            finish(folder)
            make_lengths(folder / "cache", pairs)
    else:
        write_text(folder, pairs)
    text = size_of(folder, "train.*")
    for name in ("prepare", "buckets", "packed"):
        process, own = start(folder, name), 0.0
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                own = max(own, resident(process.pid, "RssAnon"))
            time.sleep(0.01)
        found = json.loads(process.communicate()[0])
        each = ", ".join(f"{what} {used:.2f} ({clock:.2f})" for what, (used, clock) in found["seconds"].items())
        per = 1e6 * sum(used for used, _ in found["seconds"].values()) / pairs
        sizes = f"text {text:,.0f}, arrays {size_of(folder, 'cache/*/*'):,.0f} MiB"
        held = f"held {found['held']:,.0f} MiB, {own:,.0f} without files"
        print(f"{pairs:>11,} {name:<8}{each} s; {per:.1f} us a pair; {held}; {sizes}", flush=True)


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
    for number, pairs in zip(itertools.count(), [PLAN.value] if PLAN.value else map(int, PAIRS.value)):
        kept = Path(KEEP.value, f"{'lengths' if PLAN.value else 'pairs'}{pairs}")
        with contextlib.nullcontext(kept) if KEEP.value else tempfile.TemporaryDirectory() as folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            measure(Path(folder), pairs)
            if KILLS.value and not number and not PLAN.value:
                kill(Path(folder), random.Random(SEED.value))


if __name__ == "__main__":
    app.run(main)
