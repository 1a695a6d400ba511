"""Text in, text out: the one path by which a model answers, for predict, evaluate and the samples of training."""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.checkpoints.digests import digests
from jformer.config.options import Config
from jformer.data.sources.split import Pair
from jformer.decoding.mbr import rank
from jformer.errors import UserError
from jformer.inference.answers import (
    TRUNCATED,
    Alignment,
    EncodedPair,
    Output,
    Piece,
    Request,
    Scored,
    SearchTree,
    check_pairs,
    check_requests,
    check_texts,
    joined,
    whole_groups,
)
from jformer.inference.attention_pass import WatchedPass, to_restore
from jformer.inference.attention_types import Attended
from jformer.inference.batching import (
    BatchedSearch,
    CompileClock,
    Hypotheses,
    batch_rows,
    ignore,
    refuse_nan,
    shapes_of,
    sorted_batches,
)
from jformer.inference.compiled_searches import make_answer, make_key
from jformer.inference.generation import writable
from jformer.inference.head_answers import HEADS
from jformer.inference.inputs import Inputs
from jformer.inference.restore import Trained, decoding_mesh, restore, restore_member
from jformer.inference.scoring import make_scorer
from jformer.inference.search_tree import RecordedSearch, refuse_without_beam
from jformer.inference.unstacked_params import LaidOut
from jformer.models.parts import count_params
from jformer.storage import digest_of


class Predictor:
    """A trained model with its tokenizers: `predict` answers texts, `score` tells how probable given answers are."""

    def __init__(
        self, run: Trained, members: Sequence[Trained] = (), mesh: Mesh | None = None, lay_out: bool = True
    ) -> None:
        """Hold what answers need; `params` may be replaced while training goes on.

        `members` are models of the same vocabulary that decide together with this one. The devices of a mesh share the
        rows of a batch; without one, all is computed where the parameters lie. With `lay_out`, a copy of the
        parameters is kept that answers are quicker with.
        """
        self.config, self.task, self.tokenizers = run.config, run.task, run.tokenizers
        self.model, self.params, self.steps = run.model, run.params, run.steps
        self.members, self.mesh = members, mesh
        self.on_answered: Callable[[int], None] = ignore  # is told how many inputs, or pieces of them, were answered
        options, self.models = run.config.decode, (run.model, *(member.model for member in members))
        self.inputs = Inputs(options, run.task, run.tokenizers, [model.config for model in self.models])
        self._scorer = functools.partial(make_scorer, self.models, options.ensemble_average, mesh)
        self._watched, self._clock = WatchedPass(run.model, self.inputs), CompileClock()  # of forced passes
        self._search: BatchedSearch | None = None
        if run.task.answer:
            searched = run.task.answer not in HEADS
            self.laid_out = LaidOut(self.models, mesh, rounded=searched, copies=lay_out)
            self.vocabulary = writable(run.tokenizers[1], options) if searched else np.ones(0, bool)  # that is written
            key = make_key(self.models, options, self.vocabulary, self.inputs.symbols, mesh)
            self._search = BatchedSearch(make_answer(key, run.task.answer), self.inputs, mesh)
            self._recorded = RecordedSearch(key, self.inputs)

    def __repr__(self) -> str:
        """Name the model and how it answers."""
        options, size = self.config.decode, count_params(self.params)
        search = f"beam_size={options.beam_size}" if options.search == "beam" else f"samples={options.samples}"
        model = f"{self.config.task} with {self.config.model.family} of {size:,} parameters"
        return f"<Predictor: {model}, steps={list(self.steps)}, search={options.search!r}, {search}>"

    @property
    def counts(self) -> dict[str, int]:
        """What was cut, split, empty or unknown, so far."""
        return self.inputs.counts

    @property
    def compile_seconds(self) -> float:
        """Seconds so far in which the first batch of every shape was answered, compiling included."""
        return self._clock.seconds + (self._search.clock.seconds if self._search else 0.0)

    def forget(self) -> None:
        """Forget what inputs so far told: the counts, and whether outputs are short. What is compiled stays."""
        self.counts.clear()
        if self._search:
            self._search.forget()

    def fingerprint(self) -> str:
        """Return what identifies the parameters and vocabularies that answers depend on, those of members too."""
        own = [tokenizer.fingerprint for tokenizer in self.tokenizers]
        return digest_of([*own, *(digests(params) for params in self.all_params)])

    @property
    def all_params(self) -> tuple[PyTree, ...]:
        """The parameters of each of `models`."""
        return (self.params, *(member.params for member in self.members))

    def predict(self, texts: Iterable[str]) -> list[str]:
        """Answer every text, in order: with its translation, label or tags, or with the text itself and how it goes on.

        A question comes with its context, a TAB between them; where the context does not answer it, so does "".
        An empty one stays empty, unless it is to be continued. An image is given by its path, as in data.image_files.

        Raises UserError for a task that has no answers, and for what is no list of texts; only those that are to be
        continued may have several lines.
        """
        asked = check_texts(texts, "predict(['a text', 'another'])", one_line=not self.inputs.continues)
        return [outputs[0].text for outputs in self.generate(asked)]

    def generate(self, requests: Iterable[Request | str]) -> list[list[Output]]:
        """Answer every request or text, in order, with as many outputs as the options ask for, best first.

        Raises UserError for a task that has no answers, phrases that cannot be written, and scores that are no numbers.
        """
        found: dict[int, list[Output]] = {}
        for some in self.arriving(requests):
            found |= some
        return [found[i] for i in range(len(found))]

    def arriving(self, requests: Iterable[Request | str]) -> Iterator[dict[int, list[Output]]]:
        """Yield number of a request → its outputs, batch by batch, in any order; raise as `generate` does."""
        usage = "generate(['a text', jformer.Request('another', prefix='begins so')])"
        asked = check_requests(requests, usage, one_line=not self.inputs.continues)
        if self._search is None:
            raise UserError(f"task={self.config.task!r} has no answer to a text; --mode=evaluate scores it")
        groups = self.inputs.pieces(asked)
        pieces = [piece for group in groups for piece in group]
        searched = self._search(self.laid_out(self.all_params), pieces, self.on_answered)
        for some in whole_groups([*map(len, groups)], searched):
            answers = self.answers([groups[i] for i in some], [each for found in some.values() for each in found])
            yield dict(zip(some, answers, strict=True))

    def answers(self, groups: Sequence[Sequence[Piece]], hypotheses: Sequence[Hypotheses]) -> list[list[Output]]:
        """Return the outputs for every request, given as its pieces, of what a search found for all pieces in turn."""
        pieces = [piece for group in groups for piece in group]
        outputs = [self._outputs(piece, each) for piece, each in zip(pieces, hypotheses, strict=True)]
        if self.config.decode.alignments:
            outputs = list(self._align(pieces, outputs))
        answers = iter(outputs)
        return [self._joined([next(answers) for _ in group]) for group in groups]

    def search_trees(self, requests: Iterable[Request | str]) -> list[list[SearchTree]]:
        """Return the beam search for every request or text, in order: a tree of each piece, none of an empty one.

        It is searched again, by the same steps. Raises UserError where no beam of two or more is searched with, and for
        what `generate` refuses.
        """
        refuse_without_beam(self.task.answer, self.config.decode)
        usage = "search_trees(['a text', jformer.Request('another', prefix='begins so')])"
        groups = self.inputs.pieces(check_requests(requests, usage, one_line=not self.inputs.continues))
        trees = iter(self._recorded(self.laid_out(self.all_params), [piece for group in groups for piece in group]))
        return [[next(trees) for _ in group] for group in groups]

    def score(self, pairs: Iterable[tuple[str, str]]) -> list[Scored]:
        """Return the log-probability of every (source, target) pair's target given its source, in order.

        A language model reads the target alone. What is over the limits of training is cut, counted and marked.

        Raises UserError for a task without targets, for what is no list of pairs of texts, and for scores that are no
        numbers.
        """
        checked = check_pairs(pairs, "score([('a source', 'its target')])", one_line=not self.inputs.continues)
        if self.task.answer not in ("text", "continuation"):
            raise UserError(f"task={self.config.task!r} has no targets to score; --mode=evaluate scores its test sets")
        if self.config.decode.overlong == "split":
            raise UserError("decode.overlong='split' cannot score: a target is one text; use 'cut'")
        encoded = self.inputs.encode_pairs(checked)
        tokens, scored = self.tokenizers[1].tokens, []
        for pair, row in zip(encoded, self._forced(encoded), strict=True):
            log_probs = refuse_nan(row["log_probs"].tolist())
            written = tuple(tokens[i] for i in pair.target)
            scored.append(Scored(sum(log_probs), tuple(log_probs), written, pair.cut))
        return scored

    def attend(self, pairs: Iterable[tuple[str, str | None]]) -> list[Attended]:
        """Return what the run attends to in every (source, target) pair, in order: all layers and heads of every part.

        A target of None is the run's own answer. A language model reads a target alone; without one, it goes on from
        the source. A label is a target; an answer to a question is words of its context, and of several windows of it
        the one with the answer is shown. A run of mlm or denoise reads a source alone, of which noise hides some, the
        same each time; the text that it is to restore is its target.

        Raises UserError for an ensemble, whose members attend each by itself, for what is no list of pairs of texts,
        and for weights that give no numbers.
        """
        if self.members:
            raise UserError("decode.ensemble: the members of an ensemble attend each by itself; leave it out")
        usage = "attend([('a source', 'its target'), ('another', None)])"
        checked = check_pairs(pairs, usage, one_line=not self.inputs.continues, answered=True)
        if not self.task.answer:
            return self._watched(self.params, to_restore(checked))
        answers = iter(self.generate([source for source, target in checked if target is None]))
        whole = []
        for source, target in checked:
            own = next(answers)[0] if target is None else Output(target)
            whole.append(Pair(source, own.text, start=own.span[0] if own.span else None))
        return self._watched(self.params, whole)

    def _joined(self, answers: Sequence[list[Output]]) -> list[Output]:
        """Return the outputs for an input of those for its pieces."""
        join = HEADS[self.task.answer].join if self.task.answer in HEADS else None
        return join(answers, self.config.decode) if join else joined(answers, self.inputs.symbols.eos)

    def _outputs(self, piece: Piece, hypotheses: Hypotheses) -> list[Output]:
        """Return what a search found for a piece, as texts; candidates of each other are ranked by their utility."""
        options = self.config.decode
        if self.task.answer in HEADS:
            found = list(zip(hypotheses.tokens, hypotheses.scores, strict=True))
            return HEADS[self.task.answer].read(found, self.tokenizers[1], piece)
        prompt = piece.ids if self.task.answer == "continuation" else ()
        outputs = [
            self._output([*prompt, *ids], ids, value)
            for ids, value in zip(hypotheses.tokens, hypotheses.scores, strict=True)
            if ids
        ]
        if options.search == "mbr" and outputs:
            order, utilities = rank([self.tokenizers[1].decode(output.ids) for output in outputs], options.mbr_utility)
            outputs = [outputs[i]._replace(utility=utility) for i, utility in zip(order, utilities, strict=True)]
        outputs = outputs[: options.returned]
        self.counts[TRUNCATED] += sum(self.inputs.symbols.eos not in output.ids for output in outputs)
        return outputs or [self._output([], [], -math.inf)]

    def _output(self, written: Sequence[int], ids: Sequence[int], value: float) -> Output:
        """Return what was written as text, with the number that this kind of search gives."""
        text = self.tokenizers[1].decode(written)
        if self.config.decode.search == "beam":
            return Output(text, tuple(ids), score=value)
        return Output(text, tuple(ids), log_prob=value)

    def _align(self, pieces: Sequence[Piece], outputs: Sequence[Sequence[Output]]) -> Iterator[list[Output]]:
        """Yield the outputs for every piece with the source token that each of their tokens attends to most.

        The end symbols, and tokens that attend to one, have no link.
        """
        sources, targets = (tokenizer.tokens for tokenizer in self.tokenizers)
        before, ends = self.inputs.symbols.before, (self.inputs.side.symbols.eos, self.inputs.symbols.eos)
        both = zip(pieces, outputs, strict=True)
        pairs = [EncodedPair(piece.ids, [*before, *output.ids]) for piece, each in both for output in each]
        rows = iter(zip(pairs, self._forced(pairs, attend=True), strict=True))
        for each in outputs:
            aligned = []
            for output, (pair, row) in zip(each, rows, strict=False):
                links = enumerate(row["attention"].argmax(axis=-1).tolist()[len(before) :])
                alignment = Alignment(
                    tuple((s, t) for t, s in links if pair.source[s] != ends[0] and output.ids[t] != ends[1]),
                    tuple(sources[i] for i in pair.source if i != ends[0]),
                    tuple(targets[i] for i in output.ids if i != ends[1]),
                )
                aligned.append(output._replace(alignment=alignment))
            yield aligned

    def _forced(self, pairs: Sequence[EncodedPair], attend: bool = False) -> list[dict[str, np.ndarray]]:
        """Return the log-probabilities or attention of each pair's target, token by token, in order."""
        results: list[dict[str, np.ndarray]] = [{} for _ in pairs]
        rows = batch_rows(len(pairs), self.config.decode.batch_size, self.mesh)
        for indices in sorted_batches([max(len(pair.source), len(pair.target)) for pair in pairs], rows):
            batch = self.inputs.pair_arrays([pairs[i] for i in indices], rows)
            with self._clock.batch((attend, *shapes_of(batch))):
                arrays = jax.device_get(self._scorer(attend=attend)(self.all_params, batch))
            for row, i in enumerate(indices):
                results[i] = {name: values[row, : len(pairs[i].target)] for name, values in arrays.items()}
            self.on_answered(0 if attend else len(indices))
        return results


def load(workdir: str | os.PathLike[str], overrides: Config | None = None, mesh: Mesh | None = None) -> Predictor:
    """Return the Predictor of a trained run; `overrides` replaces its saved config, to decode otherwise.

    With decode.ensemble, the other runs named there decide together with this one, each with the weights that its own
    config names. All compute in decode.dtype. The devices of the mesh share the rows of a batch: those that `overrides`
    lays out, or all there are. A run trained on more devices, or fewer, is read as well.

    Raises UserError for an ensemble run of another task or vocabulary.
    """
    mesh = mesh or decoding_mesh(overrides)
    run = restore(workdir, overrides, mesh)
    members = [restore_member(other, run, mesh) for other in run.config.decode.ensemble]
    return Predictor(run, members, mesh)
