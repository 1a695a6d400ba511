"""Prepare a corpus: tokenize the texts of a split into arrays, block by block, on all cores.

A block is BLOCK consecutive pairs, encoded by any process and kept in a file until all blocks are complete and joined.
So memory does not grow with the text, rerunning after a kill encodes only the missing blocks, and the arrays depend
neither on kills nor on the number of processes.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jformer.data.encoders import ExampleEncoder
from jformer.data.progress import show_progress
from jformer.data.repeats import hashes, in_order
from jformer.data.sources.split import SIDES, Pair, Split
from jformer.data.text import shown_unknown
from jformer.data.tokenizers import subwords
from jformer.errors import UserError
from jformer.integrity import parse_object, seal
from jformer.storage import UnwrittenError, replace_content, writing

BLOCK = 2**14  # pairs, less than a second of one core
CHUNK = 2_048  # examples tokenized at a time
FEW = 8  # blocks that one process encodes before others would have started
MOST_PROCESSES = 32
PAIRS = "pairs.npy"  # the hashes of all pairs that were read, in order


class DamagedBlockError(UserError):
    """A block could not be read and has been removed; the others are kept."""


class Task(NamedTuple):
    """A block to encode; its pairs are None if the process that encodes it also reads them."""

    number: int
    first: int  # the number of its first pair
    size: int
    pairs: Sequence[Pair] | None
    counts: Counter[str]  # of reading the pairs


Make = Callable[[Task], int]
"""Make a block and return its number of pairs."""
Shard = tuple[int, int]
"""(I, N): every N-th block from I on."""


def prepare(split: Split, encoder: ExampleEncoder, folder: Path) -> None:
    """Write the arrays of a split into a new folder, which appears only when it is complete.

    Raises UserError for an invalid text, and for a full disk, which keeps the blocks that were made.
    """
    try:
        count = encode_blocks(split, encoder, folder)
        with writing(folder):
            _join([_path(_blocks(folder), number) for number in range(count)], folder)
    except UserError as error:
        if not isinstance(error, DamagedBlockError | UnwrittenError):
            shutil.rmtree(_blocks(folder), ignore_errors=True)
        shutil.rmtree(folder.with_suffix(".new"), ignore_errors=True)
        raise
    shutil.rmtree(_blocks(folder))


def encode_blocks(split: Split, encoder: ExampleEncoder, folder: Path, shard: Shard = (0, 1)) -> int:
    """Make the missing blocks of a shard for `prepare`; return how many blocks it has.

    Raises UserError as `prepare` does, and for several shards if tokens depend on all preceding text.
    """
    blocks = _blocks(folder)
    ordered = any(getattr(side.tokenizer, "in_order", False) for side in (encoder.source, encoder.target))
    if ordered and shard != (0, 1):
        raise UserError("--shard: data.bpe_dropout must encode all texts in order: leave out one of the two")
    if ordered:
        shutil.rmtree(blocks, ignore_errors=True)
    with writing(folder):
        blocks.mkdir(parents=True, exist_ok=True)
    make = functools.partial(_make_block, split.read if split.seekable else None, encoder, blocks)
    every = _tasks_to_read(split) if split.seekable else _tasks_read(split)
    tasks = (task for task in every if task.number % shard[1] == shard[0])
    few = [] if ordered else list(itertools.islice(tasks, FEW))
    cores, sent = len(os.sched_getaffinity(0)), b""
    if cores > 1 and len(few) == FEW:
        sent = _as_sent(make)
    count = 0
    with (
        show_progress(f"tokenizing {split.name}", split.size // shard[1]) as done,
        _Pool(min(cores, MOST_PROCESSES) if sent else 0, make, sent) as pool,
    ):
        for size in pool.map(itertools.chain(few, tasks), lambda task: _path(blocks, task.number).exists()):
            done.examples += size
            count += 1
    return count


def _blocks(folder: Path) -> Path:
    """Return the folder of the blocks of a folder."""
    return folder.with_suffix(".tmp")


def _tasks_to_read(split: Split) -> Iterator[Task]:
    """Yield the blocks of a seekable split: any process can read any of them, without those before it."""
    for first in range(0, split.size, BLOCK):
        size = min(BLOCK, split.size - first)
        yield Task(number=first // BLOCK, first=first, size=size, pairs=None, counts=Counter())


def _tasks_read(split: Split) -> Iterator[Task]:
    """Yield the blocks of a split that this process reads from the beginning; the last one may be empty."""
    counts, before = Counter[str](), dict[str, int]()
    stream = split.read(counts)  # counting may begin here
    for number in itertools.count():
        pairs = list(itertools.islice(stream, BLOCK))
        found = Counter({reason: count - before.get(reason, 0) for reason, count in counts.items()})
        before = dict(counts)
        yield Task(number=number, first=number * BLOCK, size=len(pairs), pairs=pairs, counts=found)
        if len(pairs) < BLOCK:
            return


def _make_block(read: Callable[..., Iterator[Pair]] | None, encoder: ExampleEncoder, blocks: Path, task: Task) -> int:
    """Encode a block into its file, unless that exists: values and lengths of both sides, hashes, and counts."""
    path = _path(blocks, task.number)
    if path.exists():
        return task.size
    counts, pairs = task.counts, task.pairs
    if pairs is None:
        assert read
        pairs = list(itertools.islice(read(counts, task.first), task.size))
    sides = dict(zip(SIDES, (encoder.source, encoder.target), strict=True))
    sizes = {name: side.tokenizer.vocab_size if side.tokenizer else 1 for name, side in sides.items()}
    values = {name: [np.zeros(0, np.min_scalar_type(size - 1))] for name, size in sizes.items()}
    lengths: dict[str, list[int]] = {name: [] for name in sides}
    for start in range(0, len(pairs), CHUNK):
        examples = encoder.encode(pairs[start : start + CHUNK], counts)
        for i, (name, side) in enumerate(sides.items()):
            sequences = [example[i] for example in examples]
            lengths[name] += map(len, sequences)
            values[name].append(_flat(sequences, values[name][0].dtype))
            if side.tokenizer and (unknown := int(np.count_nonzero(values[name][-1] == side.symbols.unk))):
                counts["unknown tokens"] += unknown
    arrays: dict[str, Any] = {f"{name}.values": np.concatenate(parts) for name, parts in values.items()}
    arrays |= {f"{name}.lengths": np.array(each, np.uint32) for name, each in lengths.items()}
    content = io.BytesIO()
    np.savez(content, counts=json.dumps(counts), pairs=hashes(pairs), **arrays)
    with writing(path):
        replace_content(path, content.getvalue(), shared=True)  # another machine may be encoding it too
    return task.size


def _as_sent(make: Make) -> bytes:
    """Return `make` pickled for other processes, or nothing if it has parts that they cannot import."""
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        sent = pickle.dumps(make)
        return b"" if b"__main__" in sent else sent
    return b""


def _path(blocks: Path, number: int) -> Path:
    return blocks / f"{number:06}.npz"


def _flat(sequences: Sequence[Sequence[int]], dtype: np.dtype) -> np.ndarray:
    if sequences and isinstance(sequences[0], np.ndarray):
        return np.concatenate(sequences, dtype=dtype)
    return np.fromiter(itertools.chain.from_iterable(sequences), dtype)


def _join(paths: Sequence[Path], folder: Path) -> None:
    """Join the blocks into arrays in a folder beside the final one, and rename it."""
    made = folder.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    counts: Counter[str] = Counter({"examples used": 0})
    for found in _column(paths, "counts"):
        for reason, count in parse_object(str(found)).items():
            counts[shown_unknown(reason, counts)] += count
    for side in SIDES:
        _save(made / f"{side}.values.npy", _column(paths, f"{side}.values"))
        _save(made / f"{side}.offsets.npy", _offsets(_column(paths, f"{side}.lengths")))
    _save(made / PAIRS, in_order(functools.partial(_column, paths, "pairs")))
    (made / "counts.json").write_text(json.dumps(counts))
    seal(made)
    made.rename(folder)


def _column(paths: Iterable[Path], name: str) -> Iterator[np.ndarray]:
    """Yield an array of each block. If a block is damaged, remove it and raise DamagedBlockError."""
    for path in paths:
        try:
            with np.load(path) as block:
                yield block[name]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            path.unlink(missing_ok=True)
            raise DamagedBlockError(f"{path} is damaged: rerun the same command") from error


def _offsets(lengths: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the offsets of sequences of these lengths, and the end of the last one."""
    ends = np.zeros(1, np.int64)
    yield ends
    for each in lengths:
        ends = np.cumsum(np.append(ends[-1:], each))  # of a block without examples: where it begins
        yield ends[1:]


def _save(path: Path, pieces: Iterator[np.ndarray]) -> None:
    """Save an array given in pieces, as `numpy.save` saves the whole."""
    length, dtype = 0, np.dtype(np.uint64)
    with path.open("wb") as file:
        _write_header(file, length, dtype)
        for piece in pieces:
            length, dtype = length + len(piece), piece.dtype
            file.write(piece.tobytes())
        file.seek(0)
        _write_header(file, length, dtype)  # the same size: NumPy leaves room for the length of an array


def _write_header(file: IO[bytes], length: int, dtype: np.dtype) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    np.lib.format.write_array_header_1_0(file, header)


class _Pool:
    """Worker processes that encode blocks, if any. Each runs `serve` and does not import this process's main module."""

    def __init__(self, count: int, make: Make, sent: bytes) -> None:
        self._count, self._make, self._sent = count, make, sent
        self._started: list[subprocess.Popen[bytes]] = []
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def __enter__(self) -> "_Pool":
        for _ in range(self._count):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment)
        self._started.append(process)
        self._idle.put(process)
        with contextlib.suppress(BrokenPipeError):  # it has ended: `_ask` replaces it
            _send(process.stdin, self._sent)

    def map(self, tasks: Iterable[Task], done: Callable[[Task], bool]) -> Iterator[int]:
        """Yield the size of each block, in order, while workers encode the next ones."""
        if not self._count:
            yield from map(self._make, tasks)
            return
        threads = ThreadPoolExecutor(self._count)
        waiting: deque[Future[int]] = deque()
        try:
            for task in tasks:
                waiting.append(threads.submit(self._make if done(task) else self._ask, task))
                if len(waiting) > 2 * self._count:
                    yield waiting.popleft().result()
            for each in waiting:
                yield each.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _ask(self, task: Task) -> int:
        """Have a worker encode a block; if it was killed, replace it and encode the block here."""
        process = self._idle.get()
        try:
            _send(process.stdin, pickle.dumps(task))
            answer = pickle.load(process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError):
            self._start()
            return self._make(task)
        self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return int(answer)


def _send(stream: IO[bytes] | None, content: bytes) -> None:
    assert stream
    stream.write(content)
    stream.flush()


def serve() -> None:
    """Encode the blocks requested on standard input until it ends; answer each with its size or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to standard error
    subwords.THREADS = 1
    with contextlib.suppress(EOFError, BrokenPipeError, pickle.UnpicklingError):  # the parent has ended
        make: Make = pickle.load(sys.stdin.buffer)
        while True:
            task = pickle.load(sys.stdin.buffer)
            try:
                answer: int | Exception = make(task)
            except Exception as error:
                answer = error
            _send(answers, pickle.dumps(answer))
