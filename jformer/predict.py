"""Text in, text out: the one path by which a model answers, for predict, evaluate and the samples of training."""

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from etils.epath import Path
from jax.sharding import Mesh

from jformer import config
from jformer.config import Config
from jformer.data.tokenizers import EOS, Tokenizer
from jformer.data.vocabularies import load_tokenizers
from jformer.errors import UserError
from jformer.generation import make_answer
from jformer.mbr import rank
from jformer.requests import CUT, LONG, RUNAWAY, Inputs, Output, Piece, Request, Scored, writable
from jformer.restore import build_sized, build_task, check_heads, load_params, open_mesh
from jformer.scoring import make_scorer
from jformer.sharding import fill_rows, make_mesh
from jformer.storage import run_path
from jformer.tasks import Task

AT_ONCE = 2  # batches that are computed at the same time
FEW = 8  # inputs that are answered without waiting for a whole batch to be computed
Member = tuple[Any, Any]
"""A model and its parameters."""


class Predictor:
    """A trained model with its tokenizers: `predict` answers texts, `score` says what it thinks of given answers."""

    def __init__(
        self,
        config: Config,
        task: Task,
        tokenizers: tuple[Tokenizer, Tokenizer],
        model: Any,
        params: Any,
        others: Sequence[Member] = (),
        mesh: Mesh | None = None,
    ) -> None:
        """Hold what answers need; `params` may be replaced while training goes on.

        `others` are models of the same vocabulary that decide together with this one. The devices of a mesh share the
        rows of a batch; without one, all is done where the parameters lie.
        """
        self.config, self.task, self.tokenizers = config, task, tokenizers
        self.model, self.params, self.others, self.mesh = model, params, others, mesh
        models = (model, *(other for other, _ in others))
        learned = [each.config.max_length for each in models if each.config.positions == "learned"]
        self._scorer = functools.cache(functools.partial(make_scorer, models, config.decode.ensemble_average, mesh))
        self.inputs = Inputs(config.decode, task, tokenizers, min(learned, default=None))
        self._mostly_short = not self.inputs.continues  # outputs, as far as is known
        self._compiled: set[tuple[Any, ...]] = set()  # sizes of batches
        self._answer: Any = None
        if task.answer:
            mask = writable(tokenizers[1], config.decode)
            self._answer = make_answer(models, task.answer, config.decode, mask, mesh)

    @property
    def counts(self) -> dict[str, int]:
        """What was cut, split, empty or unknown, so far."""
        return self.inputs.counts

    @property
    def cut(self) -> int:
        """Inputs that were longer than the model's limit, so far."""
        return self.counts[CUT]

    @property
    def _params(self) -> tuple[Any, ...]:
        return (self.params, *(tree for _, tree in self.others))

    def predict(self, texts: Sequence[str]) -> list[str]:
        """Answer every text, in order: with its translation, its label, or the text itself and how it goes on.

        An empty one stays empty, unless it is to be continued. An image is given by its place, as in data.images.

        Raises UserError for a task that has no answers.
        """
        requests = [Request(text, line=line) for line, text in enumerate(texts)]
        return [outputs[0].text for outputs in self.generate(requests)]

    def generate(self, requests: Sequence[Request]) -> list[list[Output]]:
        """Answer every request, in order, with as many outputs as the options ask for, best first; at least one.

        Raises UserError for a task that has no answers, phrases that cannot be written, and scores that are no numbers.
        """
        if self._answer is None:
            raise UserError(f"task={self.config.task!r} has no answer to a text; --mode=evaluate scores it")
        groups = self.inputs.pieces(requests)
        pieces = [piece for group in groups for piece in group]
        found = self._search(pieces)
        if self.config.decode.alignments:
            found = list(self._align(pieces, found))
        answers = iter(found)
        return [_joined(group, [next(answers) for _ in group]) for group in groups]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        """Tell the log-probability of every (source, target) pair's target given its source, in order.

        A language model reads the target alone. What is over the limits of training is cut and counted.

        Raises UserError for a task whose model does not say targets, and for scores that are no numbers.
        """
        if self.task.answer not in ("text", "continuation"):
            raise UserError(f"task={self.config.task!r} has no targets to score; --mode=evaluate scores its test sets")
        if self.config.decode.overlong == "split":
            raise UserError("decode.overlong='split' cannot score: a target is one text; use 'cut'")
        encoded = self.inputs.sides(pairs)
        written, scored = self.tokenizers[1].tokens, []
        for (_, target), row in zip(encoded, self._force(encoded), strict=True):
            log_probs = numbers(row["log_probs"].tolist())
            scored.append(Scored(sum(log_probs), tuple(log_probs), tuple(written[i] for i in target)))
        return scored

    def _rows(self, count: int) -> int:
        """Return the rows of every batch: few where there are few inputs, as when somebody types them."""
        size = self.config.decode.batch_size
        rows = min(FEW, size) if count <= FEW else size
        return fill_rows(rows, self.mesh) if self.mesh else rows

    def _search(self, pieces: Sequence[Piece]) -> list[list[Output]]:
        """Return the outputs for every piece, in order.

        A first attempt has little room. The few outputs that need more would hold up all others in their batches, so
        they are asked for again, in small batches of their own.
        """
        found: list[list[Output]] = [[] for _ in pieces]
        size = self._rows(len(pieces))
        short = self._mostly_short and size > FEW
        late = self._attempt(pieces, range(len(pieces)), size, found, short=short)
        self._mostly_short &= len(late) <= len(pieces) // 4
        if self._attempt(pieces, late, self._rows(FEW), found, least=LONG):
            raise AssertionError("a search with room for its limits was left undone")
        return found

    def _attempt(
        self, pieces: Sequence[Piece], places: Sequence[int], rows: int, found: list[list[Output]], **shape: Any
    ) -> list[int]:
        """Fill in the outputs for the pieces at some places, and return the places of those left undone."""
        late: list[int] = []
        for batch, answers in self._answers(pieces, places, rows, shape, late):
            for i, tokens, scores, lengths, done in zip(batch, *answers, strict=False):
                if done:
                    hypotheses = [ids[:n].tolist() for ids, n in zip(tokens, lengths, strict=True)]
                    found[i] = self._outputs(pieces[i], hypotheses, numbers(scores.tolist()))
                else:
                    late.append(i)
        return late

    def _answers(
        self, pieces: Sequence[Piece], places: Sequence[int], rows: int, shape: Mapping[str, Any], late: list[int]
    ) -> Iterator[tuple[Sequence[int], Any]]:
        """Yield the places of each batch and the answers to it, while the next ones are being computed.

        A step of decoding is too small to keep several cores busy: two batches at once are half as quick again. Devices
        that exchange anything must all do so in the same order, so on a mesh there is one batch at a time.
        """
        waiting: deque[tuple[Sequence[int], Future[Any]]] = deque()
        at_once = 1 if self.mesh and self.mesh.size > 1 else AT_ONCE
        with ThreadPoolExecutor(at_once) as pool:
            for order in _in_batches([len(pieces[i].ids) for i in places], rows):
                batch: Sequence[int] = [places[i] for i in order]
                if shape.get("short"):
                    batch, rest = self.inputs.part(pieces, batch, FEW)
                    late += rest
                arrays, room = self.inputs.arrays([pieces[i] for i in batch], rows, **shape)
                waiting.append((batch, pool.submit(self._compute, arrays, room)))
                sizes = room, *((name, array.shape) for name, array in arrays.items())
                if sizes not in self._compiled:  # else the next batch would be compiled once more meanwhile
                    self._compiled.add(sizes)
                    waiting[-1][1].exception()
                if len(waiting) > at_once:
                    yield _ready(waiting.popleft())
            yield from map(_ready, waiting)

    def _compute(self, arrays: dict[str, np.ndarray], room: int) -> Any:
        return jax.device_get(self._answer(self._params, arrays, room))

    def _outputs(self, piece: Piece, hypotheses: Sequence[Sequence[int]], scores: Sequence[float]) -> list[Output]:
        """Return what a search found for a piece, as texts, ranked anew where they are candidates of each other."""
        options, decode = self.config.decode, self.tokenizers[1].decode
        before = piece.ids if self.task.answer == "continuation" else ()
        found = [
            Output(" ".join(decode([*before, *ids]).split("\n")), tuple(ids), score)  # a line for a line
            for ids, score in zip(hypotheses, scores, strict=True)
            if ids
        ]
        if options.search == "mbr":
            order, utilities = rank([decode(output.ids) for output in found], options.mbr_utility)
            found = [found[i]._replace(score=utility) for i, utility in zip(order, utilities, strict=True)]
        found = found[: options.returned]
        if self.task.answer != "label":
            self.counts[RUNAWAY] += sum(EOS not in output.ids for output in found)
        return found or [Output("", score=-math.inf)]

    def _align(self, pieces: Sequence[Piece], found: Sequence[Sequence[Output]]) -> Iterator[list[Output]]:
        """Yield the outputs for every piece with the source token that each of their tokens looks at most.

        Tokens that look at the end symbol stay alone.
        """
        pairs = [(piece.ids, output.ids) for piece, outputs in zip(pieces, found, strict=True) for output in outputs]
        rows = iter(zip(pairs, self._force(pairs, align=True), strict=True))
        for outputs in found:
            aligned = []
            for output, ((source, target), row) in zip(outputs, rows, strict=False):
                links = enumerate(row["alignment"].tolist())
                kept = tuple((s, t) for t, s in links if target[t] != EOS and source[s] != EOS)
                aligned.append(output._replace(alignment=kept))
            yield aligned

    def _force(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], align: bool = False
    ) -> list[dict[str, np.ndarray]]:
        """Return what the forced pass says of each pair's target, token by token, in order."""
        found: list[dict[str, np.ndarray]] = [{} for _ in pairs]
        size = self._rows(len(pairs))
        for rows in _in_batches([max(map(len, pair)) for pair in pairs], size):
            batch = self.inputs.pairs([pairs[i] for i in rows], size)
            result = jax.device_get(self._scorer(align=align)(self._params, batch))
            for place, i in enumerate(rows):
                found[i] = {name: values[place, : len(pairs[i][1])] for name, values in result.items()}
        return found


def _ready(waiting: tuple[Sequence[int], Future[Any]]) -> tuple[Sequence[int], Any]:
    return waiting[0], waiting[1].result()


def _joined(pieces: Sequence[Piece], answers: Sequence[list[Output]]) -> list[Output]:
    """Return the outputs for a whole input: none is an empty one, and the best ones of several pieces become one."""
    if len(answers) < 2:
        return answers[0] if answers else [Output("")]
    ids: list[int] = []
    links: list[tuple[int, int]] = []
    before = 0  # source tokens
    best = [outputs[0] for outputs in answers]
    for piece, output in zip(pieces, best, strict=True):
        ids = [i for i in ids if i != EOS]
        links += [(source + before, target + len(ids)) for source, target in output.alignment]
        ids += output.ids
        before += len(piece.ids) - 1
    text, score = " ".join(output.text for output in best), sum(output.score for output in best)
    return [Output(text, tuple(ids), score, tuple(links))]


def numbers(scores: list[float]) -> list[float]:
    """Return the scores. Raise UserError if there is one that is no number."""
    if any(math.isnan(score) for score in scores):
        raise UserError(
            "the model's scores are no numbers, so its weights are broken: try another evaluate.weights, or look where "
            "metrics.jsonl says null and train again from before"
        )
    return scores


def _in_batches(lengths: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield the places of sequences, the shortest first, batch by batch."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def load(workdir: str | Path, overrides: Config | None = None, mesh: Mesh | None = None) -> Predictor:
    """Return the Predictor of a trained run; `overrides` replaces its saved config, to decode otherwise.

    It uses the given mesh, or that of `overrides`, or all devices: wherever the run was trained, it opens here.

    The runs that decode.ensemble names come with it, each with its own model and its own evaluate.weights. Raises
    UserError for one that has another task or other tokenizers.
    """
    workdir = run_path(workdir)
    settings = overrides or config.load(workdir / "config.json")
    task, tokenizers = build_task(settings), load_tokenizers(workdir / "tokenizer")
    mesh = mesh or (open_mesh(overrides) if overrides else make_mesh())
    others = [_open_other(run_path(other), settings, tokenizers) for other in settings.decode.ensemble]

    def member(workdir: Path, own: Config) -> Member:
        dtype = settings.decode.dtype or own.model.dtype
        sized_as = dataclasses.replace(own, model=dataclasses.replace(own.model, dtype=dtype))
        model = build_sized(sized_as, task, tokenizers)
        check_heads(model.config, mesh)
        return model, load_params(workdir, own, model, mesh)

    members = [member(other, own) for other, own in others]
    return Predictor(settings, task, tokenizers, *member(workdir, settings), members, mesh)


def _open_other(workdir: Path, settings: Config, tokenizers: tuple[Tokenizer, Tokenizer]) -> tuple[Path, Config]:
    """Return the place and config of a run that is to decide with ours, or UserError where it cannot."""
    own = config.load(workdir / "config.json")
    if own.task != settings.task:
        raise UserError(f"decode.ensemble: {workdir} has task={own.task!r}, this run {settings.task!r}; leave it out")
    for side, ours, theirs in zip(
        ("source", "target"), tokenizers, load_tokenizers(workdir / "tokenizer"), strict=True
    ):
        if ours.fingerprint != theirs.fingerprint:
            raise UserError(
                f"decode.ensemble: {workdir} has another {side} vocabulary than this run, so their tokens mean "
                "different things; train it with train.init_from, or leave it out"
            )
    return workdir, own
