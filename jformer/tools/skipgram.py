"""Word vectors from a text of your own: skip-gram with negative sampling (Mikolov et al. 2013, section 2.2).

python -m jformer.skipgram --input=TEXT --output=VECTORS [--size=128] [--window=5] [--negatives=5] [--epochs=10]

TEXT is a file, or several with a comma between them, of lines of words, plain or .gz; VECTORS is word2vec's text
format, which a run of as many model dimensions begins with by --config.train.source_vectors=VECTORS.
  --size       numbers of a vector: the d_model of the run (or its model.recurrent.embedding_size)
  --window     words to either side that a word predicts, at most; each time a random number up to it
  --negatives  words that are drawn for each such pair, which it shall not predict
  --min_count  rarer words have no vector                                        (5)
  --sample     words more frequent than this share are left out at random, more often the more frequent they are (1e-3)
  --rate       the learning rate of Adam, which falls to 0                       (5e-3)
  --seed       the same seed gives the same vectors                              (0)
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jformer.data.progress import counted, show_progress
from jformer.data.text import read_lines
from jformer.data.tokenizers import word_splitting as words
from jformer.errors import DONE, MISTAKE, UserError
from jformer.storage import check_writable, refusals_told, replace_content

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

CHUNK = 20_000  # lines whose pairs are shuffled together
LARGEST, SMALLEST = 4_096, 64  # pairs of an update
UPDATES = 200  # of an epoch, or more: a short text has smaller updates, not fewer


@dataclasses.dataclass(frozen=True)
class Options:
    """How vectors are learned; the flags of the same names."""

    size: int = 128
    window: int = 5
    negatives: int = 5
    min_count: int = 5
    epochs: int = 10
    sample: float = 1e-3
    rate: float = 5e-3
    seed: int = 0

    def check(self) -> None:
        """Raise UserError for the first option that cannot work."""
        for key in ("size", "window", "negatives", "min_count", "epochs"):
            if getattr(self, key) < 1:
                raise UserError(f"--{key}={getattr(self, key)} must be at least 1")
        if self.seed < 0:
            raise UserError(f"--seed={self.seed} must be at least 0")
        for key in ("sample", "rate"):
            if not 0 < getattr(self, key) <= 1:
                raise UserError(f"--{key}={getattr(self, key)} must be above 0 and at most 1")


def main(argv: list[str] | None = None) -> int:
    """Learn vectors, write them and return the exit code: 0, or 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m jformer.skipgram", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True)
    parser.add_argument("--output", type=Path, required=True)
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    given = vars(parser.parse_args(argv))
    texts, output = [Path(name) for name in given.pop("input").split(",")], given.pop("output")
    try:
        with refusals_told():
            check_output(output, texts)
            vocabulary, vectors = learn(texts, Options(**given), say=lambda line: print(line, flush=True))
            write(output, vocabulary, vectors)
    except UserError as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return MISTAKE
    print(f"{output}: {counted(len(vocabulary), 'words')} of {vectors.shape[1]} numbers; a run begins with them by")
    print(f"  --config.train.source_vectors={output} --config.model.d_model={vectors.shape[1]}")
    return DONE


def check_output(output: Path, texts: list[Path]) -> None:
    """Raise UserError for a file that cannot be written, or that is one of the texts."""
    if any(output.resolve() == text.resolve() for text in texts):
        raise UserError(f"--output={output} is --input: name another file")
    if output.is_dir():
        raise UserError(f"--output={output} is a folder: name a file")
    check_writable("--output", output.resolve().parent)


def learn(texts: list[Path], options: Options, say: Callable[[str], None]) -> tuple[list[str], np.ndarray]:
    """Return the words of some texts, the most frequent first, and their vectors f32 [v d].

    Raises UserError for options that cannot work, and for texts in which no word is frequent enough.
    """
    options.check()
    vocabulary, lines = read(texts, options.min_count)
    counts = np.bincount(np.concatenate(lines), minlength=len(vocabulary))
    say(f"{counted(int(counts.sum()), 'words')}, {len(vocabulary):,} of them different")
    kept = keep_probabilities(counts, options.sample)
    expected = float(kept @ counts) * (options.window + 1)  # pairs of an epoch, about: half of 2 x window a word
    size = int(np.clip(expected / UPDATES, SMALLEST, LARGEST))
    params, state, update = _begin(len(vocabulary), options, max(1, round(options.epochs * expected / size)))
    noise = np.cumsum(counts**0.75) / (counts**0.75).sum()
    began = time.monotonic()
    for epoch in range(options.epochs):
        losses = []
        for number, batch in enumerate(batches(lines, kept, noise, size, options, epoch)):
            params, state, loss = update(params, state, *batch)
            if number % 100 == 0:  # so that no more than so many wait for the device
                losses.append(float(loss))
        if not losses:
            raise UserError("--input: no two frequent words stand in one line: there is nothing to learn from")
        seconds = time.monotonic() - began
        left = seconds / (epoch + 1) * (options.epochs - epoch - 1)
        say(f"epoch {epoch + 1} of {options.epochs}: loss {np.mean(losses):.3f} a pair, {left:.0f} s left")
    return vocabulary, np.asarray(params[0])


def read(texts: list[Path], min_count: int) -> tuple[list[str], list[np.ndarray]]:
    """Return the words that some files hold often enough, the most frequent first, and their ids i32, line by line."""
    met: Counter[str] = Counter()
    split: list[list[str]] = []
    with show_progress("reading the text") as done:
        for path in texts:
            for line in read_lines(path, Counter(), invalid="replace"):
                split.append(words.split(line))
                met.update(split[-1])
                done.count(1)
    vocabulary = sorted(
        (word for word, count in met.items() if count >= min_count), key=lambda word: (-met[word], word)
    )
    if len(vocabulary) < 2:
        raise UserError(
            f"--input: {counted(len(met), 'words')}, of which {len(vocabulary)} stand there --min_count="
            f"{min_count} times: give more text, or a lower number"
        )
    ids = {word: i for i, word in enumerate(vocabulary)}
    return vocabulary, [np.array([ids[word] for word in line if word in ids], np.int32) for line in split]


def keep_probabilities(counts: np.ndarray, sample: float) -> np.ndarray:
    """Return the probability that a word is kept each time it is met (word2vec.c's form of equation 5).

    >>> keep_probabilities(np.array([10, 990]), 0.01).round(3).tolist()
    [1.0, 0.111]
    """
    share = counts / counts.sum()
    return np.minimum(1.0, np.sqrt(sample / share) + sample / share)


def pairs(lines: list[np.ndarray], window: int, rng: np.random.Generator) -> np.ndarray:
    """Return i32 [n 2]: each word with the words around it in its line, up to a random distance of its own.

    >>> pairs([np.array([1, 2, 3])], 1, np.random.default_rng(0)).tolist()
    [[1, 2], [2, 3], [2, 1], [3, 2]]
    """
    ids = np.concatenate([*lines, np.zeros(0, np.int32)])
    line = np.repeat(np.arange(len(lines)), [len(each) for each in lines])
    reach = rng.integers(1, window + 1, len(ids))
    found = []
    for distance in range(1, window + 1):
        left = np.arange(len(ids) - distance)
        right = left + distance
        together = line[left] == line[right]
        for center, context in ((left, right), (right, left)):
            chosen = together & (reach[center] >= distance)
            found.append(np.stack([ids[center[chosen]], ids[context[chosen]]], axis=1))
    return np.concatenate(found)


def batches(
    lines: list[np.ndarray], kept: np.ndarray, noise: np.ndarray, size: int, options: Options, epoch: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield words [b], words that they predict [b] and drawn words [b n], a function of seed, epoch and place alone.

    What is left over of a chunk of lines waits for the next one; what is left over in the end is not learned from,
    unless it is all there is.

    Args:
        lines: the ids of every line.
        kept: the probability [v] that a word is kept.
        noise: the cumulative distribution [v] that words are drawn from.
        size: b.
        options: seed, window and number of drawn words.
        epoch: from 0.
    """
    rest, rows, some = np.zeros((0, 2), np.int32), iter(lines), False
    for number, chunk in enumerate(iter(lambda: list(islice(rows, CHUNK)), [])):
        rng = np.random.default_rng([options.seed, epoch, number])
        chunk = [line[rng.random(len(line)) < kept[line]] for line in chunk]
        rest = np.concatenate([rest, rng.permutation(pairs(chunk, options.window, rng))])
        whole = len(rest) - len(rest) % size
        for batch in rest[:whole].reshape(-1, size, 2):
            yield _with_noise(batch, noise, options.negatives, rng)
        rest, some = rest[whole:], some or whole > 0
    if len(rest) and not some:
        yield _with_noise(rest, noise, options.negatives, np.random.default_rng([options.seed, epoch]))


def _with_noise(
    batch: np.ndarray, noise: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    drawn = np.searchsorted(noise, rng.random((len(batch), count)))
    return batch[:, 0], batch[:, 1], np.minimum(drawn, len(noise) - 1).astype(np.int32)


def _begin(count: int, options: Options, updates: int) -> tuple[Any, Any, Any]:
    """Return both tables [v d] as they begin, the optimizer's state, and the compiled update."""
    import jax
    import optax

    from jformer.parallel.libtpu import silence_libtpu

    silence_libtpu()
    rng = np.random.default_rng(options.seed)
    first = rng.uniform(-0.5, 0.5, (count, options.size)).astype(np.float32) / options.size  # as word2vec.c begins
    optimizer = optax.adam(optax.linear_schedule(options.rate, 0.0, updates))
    params = (jax.numpy.asarray(first), jax.numpy.zeros((count, options.size)))

    @jax.jit
    def update(params: Any, state: Any, *batch: Any) -> tuple[Any, Any, Any]:
        loss, gradient = jax.value_and_grad(negative_sampling)(params, *batch)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state, loss

    return params, optimizer.init(params), update


def negative_sampling(
    params: "tuple[Float[Array, 'v d'], Float[Array, 'v d']]",
    center: "Int[Array, ' b']",
    context: "Int[Array, ' b']",
    drawn: "Int[Array, 'b n']",
) -> "Float[Array, '']":
    """Return the mean loss of pairs: -log σ(u·v) of a word and what it predicts, -log σ(-u·v) of it and each drawn one.

    Equation 4 of Mikolov et al. 2013. `params` are the vectors of words, and those of predicted words.
    """
    import jax
    import jax.numpy as jnp

    v, u = params
    there = (v[center] * u[context]).sum(-1)
    others = jnp.einsum("bd,bnd->bn", v[center], u[drawn])
    return -(jax.nn.log_sigmoid(there) + jax.nn.log_sigmoid(-others).sum(-1)).mean()


def write(path: Path, vocabulary: list[str], vectors: np.ndarray) -> None:
    """Write word2vec's text format, whole or not at all."""
    lines = [f"{len(vocabulary)} {vectors.shape[1]}"]
    lines += [f"{word} {' '.join(f'{x:.6g}' for x in row)}" for word, row in zip(vocabulary, vectors, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_content(path, ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
