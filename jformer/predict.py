"""Text in, text out: the one path by which a model answers, for predict, evaluate and the samples of training."""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from jformer import checkpoint, config, optim
from jformer.config import Config
from jformer.data.corpus import Tokens
from jformer.data.features import Rows
from jformer.data.plan import Shape
from jformer.data.text import read_lines
from jformer.data.tokenizers import ImageTokenizer, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.generation import make_answer, prompts
from jformer.models import build_model, init_params
from jformer.tasks import TASKS, Task, sized

WINDOW = 4_096  # lines read, sorted by length and translated together
SMALLEST_LENGTH = 16  # inputs are padded to 16, 32, 64 … tokens: few shapes to compile


class Predictor:
    """A trained model with its tokenizers: `predict` maps texts to texts."""

    def __init__(
        self, config: Config, task: Task, tokenizers: tuple[Tokenizer, Tokenizer], model: Any, params: Any
    ) -> None:
        """Hold what answers need; `params` may be replaced while training goes on."""
        self.config, self.task, self.tokenizers = config, task, tokenizers
        self.model, self.params = model, params
        self.cut = 0  # inputs that were longer than the model's limit, so far
        self._continues = task.answer == "continuation"
        encoder = task.encoder(*tokenizers, evaluating=True)
        self._side = encoder.target if self._continues else encoder.source
        self._features = task.features(*tokenizers)
        self._answer = make_answer(model, task.answer, config.decode, tokenizers[1].vocab_size)

    def predict(self, texts: Sequence[str]) -> list[str]:
        """Answer every text, in order: with its translation, its label, or the text itself and how it goes on.

        A text over the model's limit is cut: at its end, or, where it is to be continued, at its beginning. An empty
        one stays empty, unless it is to be continued. An image is given by its place, as in data.images.

        Raises UserError for a task that has no answers.
        """
        if not self.task.answer:
            raise UserError(f"task={self.config.task!r} has no answer to a text; --mode=evaluate scores it")
        sequences = self._encode(texts)
        waiting = [i for i, text in enumerate(texts) if text.strip() or self._continues]
        out = [""] * len(texts)
        for rows in _in_batches(sorted(waiting, key=lambda i: len(sequences[i])), self.config.decode.batch_size):
            batch, room = self.arrays([sequences[i] for i in rows])
            answers = np.asarray(self._answer(self.params, batch, room)).tolist()
            for i, ids in zip(rows, answers, strict=False):
                text = self.tokenizers[1].decode([*sequences[i], *ids] if self._continues else ids)
                out[i] = " ".join(text.split("\n"))  # a line for a line, though texts can hold line feeds
        return out

    def _encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        if self._continues:
            limit = self._side.max_length - 1  # BOS comes first
            whole: list[Sequence[int]] = [*self.tokenizers[1].encode(texts)]
            fitting = [ids[max(0, len(ids) - limit) :] for ids in whole]
        else:
            whole = self._side.encode(texts)
            fitting = [self._side.cut(ids) for ids in whole]
        self.cut += sum(len(kept) < len(ids) for kept, ids in zip(fitting, whole, strict=True))
        return fitting

    def arrays(self, sequences: Sequence[Sequence[int]]) -> tuple[dict[str, np.ndarray], int]:
        """Return arrays of one of few shapes for the model and the search, and the most tokens any row may get."""
        options, count = self.config.decode, len(sequences)
        sizes = np.zeros(options.batch_size, np.int32)
        sizes[:count] = [len(ids) for ids in sequences]
        longest = max(map(len, sequences)) + self._continues  # BOS comes before a prompt
        length = min(max(SMALLEST_LENGTH, 1 << (longest - 1).bit_length()), self._side.max_length)
        if self._continues:
            batch, room = prompts(sequences, options.batch_size, length), options.max_extra_length
            limit = np.full(options.batch_size, room)
        else:
            order = np.arange(count)
            source = Tokens(np.concatenate(sequences), np.concatenate([[0], np.cumsum(sizes[:count])]))
            nothing = Tokens(np.zeros(0, np.int32), np.zeros(count + 1, np.int64))
            shape = Shape(options.batch_size, length, 1)
            batch = self._features.arrays(Rows(order, order, order * 0 + 1), source, nothing, shape, (0, 0))
            batch |= prompts([], options.batch_size, 1)
            room = length + options.max_extra_length
            limit = sizes + options.max_extra_length
        if self.config.model.positions == "learned":
            room = min(room, self.config.model.max_length)
            limit = np.minimum(limit, self.config.model.max_length + 1 - batch["prompt_length"])
        limit = np.where(np.arange(options.batch_size) < count, limit, 0)
        return {**batch, "limit": limit.astype(np.int32)}, room


def build_task(config: Config) -> Task:
    """Return the task the config names."""
    scores = dataclasses.asdict(config.evaluate)
    return TASKS[config.task](
        config.data,
        label_smoothing=config.optim.label_smoothing,
        **{key: scores[key] for key in ("scores", "tokenize", "lowercase")},
    )


def build_sized(config: Config, task: Task, tokenizers: tuple[Tokenizer, Tokenizer]) -> Any:
    """Return the model with the sizes that the tokenizers and the task give it."""
    source, vision = tokenizers[0], config.model.vision
    if isinstance(source, ImageTokenizer) and source.shape != (vision.image_size, vision.image_size, vision.channels):
        raise UserError(
            f"model.vision.image_size={vision.image_size} and channels={vision.channels} but the images are "
            f"{' x '.join(map(str, source.shape))} (height, width, channels): set them so"
        )
    return build_model(sized(config.model, task, *(tokenizer.vocab_size for tokenizer in tokenizers)))


def load(workdir: str | Path, overrides: Config | None = None) -> Predictor:
    """Return the Predictor of a trained run; `overrides` replaces its saved config, to decode otherwise."""
    workdir = Path(workdir)
    settings = overrides or config.load(workdir / "config.json")
    task, tokenizers = build_task(settings), load_tokenizers(workdir / "tokenizer")
    model = build_sized(settings, task, tokenizers)
    return Predictor(settings, task, tokenizers, model, load_params(workdir, settings, model))


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


def predict_file(settings: Config, workdir: Path, source: str, target: str) -> None:
    """Answer a file or standard input ('-') line by line into another: one output line for each input line."""
    predictor = load(workdir, settings)
    counts: Counter[str] = Counter()
    lines = read_lines(Path("/dev/stdin" if source == "-" else source), counts)
    with contextlib.nullcontext(sys.stdout) if target == "-" else _open_to_write(Path(target)) as out:
        while window := list(itertools.islice(lines, WINDOW)):
            for text in predictor.predict(window):
                out.write(text + "\n")
            out.flush()
            counts["lines answered"] += len(window)
            print(f"\r{counts['lines answered']:,} lines", end="", file=sys.stderr)
    counts["lines cut to the model's limit"] = predictor.cut
    print("\r" + ", ".join(f"{count:,} {what}" for what, count in counts.items() if count), file=sys.stderr)


def _open_to_write(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror}; name a file in a folder that can be written") from error


def _in_batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
