"""Text in, text out: the one path by which a model generates, for predict, evaluate and the samples of training."""

import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from jformer import checkpoint, config, optim
from jformer.config import Config, DecodeConfig
from jformer.data.text import read_lines
from jformer.data.tokenizers import BOS, EOS, PAD, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.decoding.beam import beam_search
from jformer.decoding.greedy import Decoded
from jformer.errors import UserError
from jformer.models import build_model, init_params

WINDOW = 4_096  # lines read, sorted by length and translated together
SMALLEST_LENGTH = 16  # sources are padded to 16, 32, 64 … tokens: few shapes to compile


class Predictor:
    """A trained model with its tokenizers: `predict` maps texts to texts."""

    def __init__(self, config: Config, tokenizers: tuple[Tokenizer, Tokenizer], model: Any, params: Any) -> None:
        """Hold what generation needs; `params` may be replaced while training goes on."""
        self.config = config
        self.tokenizers = tokenizers
        self.model = model
        self.params = params
        self.cut = 0  # sources that were longer than data.max_source_length, so far
        self._decode = jax.jit(functools.partial(decode, model, config.decode, tokenizers[1].vocab_size))

    def predict(self, texts: Sequence[str]) -> list[str]:
        """Translate every text, in order; an empty one stays empty, a longer one than the model's limit is cut."""
        encoded = [[*tokens, EOS] for tokens in self.tokenizers[0].encode(texts)]
        limit = self.config.data.max_source_length
        self.cut += sum(len(tokens) > limit for tokens in encoded)
        encoded = [tokens if len(tokens) <= limit else [*tokens[: limit - 1], EOS] for tokens in encoded]
        out = [""] * len(texts)
        waiting = sorted((i for i, text in enumerate(texts) if text.strip()), key=lambda i: len(encoded[i]))
        for rows in _in_batches(waiting, self.config.decode.batch_size):
            batch = source_batch([encoded[i] for i in rows], self.config.decode.batch_size, limit)
            tokens = np.asarray(self._decode(self.params, batch).tokens[:, 0])
            for i, line in zip(rows, tokens, strict=False):
                out[i] = " ".join(self.tokenizers[1].decode(line.tolist()).split("\n"))  # bytes can spell a line feed
        return out


def load(workdir: str | Path, overrides: Config | None = None) -> Predictor:
    """Return the Predictor of a trained run; `overrides` replaces its saved config, to decode otherwise."""
    workdir = Path(workdir)
    settings = overrides or config.load(workdir / "config.json")
    tokenizers = load_tokenizers(workdir / "tokenizer", settings.data.vocab_shared)
    vocab_sizes = [tokenizer.vocab_size for tokenizer in tokenizers]
    model = build_model(settings.model.with_vocabulary(*vocab_sizes))
    return Predictor(settings, tokenizers, model, load_params(workdir, settings, model))


def load_params(workdir: Path, settings: Config, model: Any) -> Any:
    """Return the parameters that `evaluate.weights` names, on one device."""
    shapes = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    abstract = checkpoint.abstract_like(shapes, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    saved = checkpoint.open_run(workdir)
    weights, steps = settings.evaluate.weights, saved.steps()
    if weights == "average":
        last = average_steps(steps, settings.train.checkpoint_every, settings.evaluate.average_last)
        params = optim.average(saved.restore(step, {"params": abstract})["params"] for step in last)
    elif weights == "ema":
        params = saved.restore(steps[-1], {"ema": abstract})["ema"]
    else:
        step = saved.progress(steps[-1])["best_step"] if weights == "best" else steps[-1]
        params = saved.restore(step, {"params": abstract})["params"]
    saved.close()
    return params


def average_steps(steps: Sequence[int], every: int, count: int) -> list[int]:
    """Return the last `count` steps at regular intervals, the last step of all among them."""
    regular = [step for step in steps if step % every == 0 or step == steps[-1]]
    if len(regular) < count:
        raise UserError(
            f"evaluate.average_last={count} but the run has {len(regular)} checkpoints; lower it or train on"
        )
    return regular[-count:]


def source_batch(sentences: Sequence[Sequence[int]], rows: int, limit: int) -> dict[str, np.ndarray]:
    """Return arrays [b s] of source sentences, padded to few lengths and to `rows` rows."""
    longest = max(map(len, sentences))
    length = min(max(SMALLEST_LENGTH, 1 << (longest - 1).bit_length()), limit)
    source = np.full((rows, length), PAD, np.int32)
    segments = np.zeros((rows, length), np.int32)
    for row, tokens in enumerate(sentences):
        source[row, : len(tokens)] = tokens
        segments[row, : len(tokens)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return {"source": source, "source_segments": segments, "source_positions": positions}


def decode(model: Any, options: DecodeConfig, vocab_size: int, params: Any, batch: dict[str, jax.Array]) -> Decoded:
    """Return the best outputs for every row of a source batch, best first; empty rows give none.

    Rows of the embedding past the tokenizer's vocabulary, PAD and BOS are never generated.
    """
    variables = {"params": params}
    rows, source_length = batch["source"].shape
    sizes = batch["source_segments"].sum(axis=1)
    limits = jnp.where(sizes > 0, sizes + options.max_extra_length, 0)
    length = source_length + options.max_extra_length
    if model.config.positions == "learned":
        length = min(length, model.config.max_length)
        limits = jnp.minimum(limits, length)
    memory = model.apply(variables, batch, method="encode")
    cache = model.apply(variables, memory, rows * options.beam_size, length, method="start")

    def step(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        valid = jnp.ones((tokens.shape[0], 1), bool)
        hidden, cache = model.apply(variables, cache, tokens[:, None], valid, method="extend")
        logits = model.apply(variables, hidden, method="logits")[:, 0].astype(jnp.float32)
        ids = jnp.arange(logits.shape[-1])
        return jnp.where((ids < vocab_size) & (ids != PAD) & (ids != BOS), logits, -jnp.inf), cache

    return beam_search(
        step,
        cache,
        beam_size=options.beam_size,
        length_penalty=options.length_penalty,
        max_lengths=limits,
        length=length,
        bos=BOS,
        eos=EOS,
        pad=PAD,
    )


def predict_file(settings: Config, workdir: Path, source: str, target: str) -> None:
    """Translate a file or standard input ('-') line by line into another: one output line for each input line."""
    predictor = load(workdir, settings)
    counts: Counter[str] = Counter()
    lines = read_lines(Path("/dev/stdin" if source == "-" else source), counts)
    with contextlib.nullcontext(sys.stdout) if target == "-" else _open_to_write(Path(target)) as out:
        while window := list(itertools.islice(lines, WINDOW)):
            for text in predictor.predict(window):
                out.write(text + "\n")
            out.flush()
            counts["lines translated"] += len(window)
            print(f"\r{counts['lines translated']:,} lines", end="", file=sys.stderr)
    counts["sources cut to data.max_source_length"] = predictor.cut
    print("\r" + ", ".join(f"{count:,} {what}" for what, count in counts.items() if count), file=sys.stderr)


def _open_to_write(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}; name a file in a folder that can be written") from error


def _in_batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
