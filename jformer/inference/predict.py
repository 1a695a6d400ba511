"""Text in, text out: how a model answers, for predict, evaluate and the samples of training.

The path of a text, in `Predictor.arriving`: `Inputs.pieces` turns it into pieces, which are sequences of ids.
`BatchedSearch` (batching.py) sorts them into batches; `Inputs.arrays` makes their arrays, and a compiled program
answers them: a search from `decoding` (`begin_search` of generation.py), or a head of one_pass.py. `Predictor.answers`
turns the ids back into text.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PyTree

from jformer.data.sources.split import Pair
from jformer.data.tokenizers import Tokenizer
from jformer.errors import UserError
from jformer.inference.answers import (
    TRUNCATED,
    Activations,
    Alignment,
    Attended,
    EncodedPair,
    Output,
    Piece,
    Request,
    Scored,
    SearchTree,
    check_pairs,
    check_requests,
    check_texts,
    join_outputs,
    whole_groups,
    written_language,
)
from jformer.inference.batching import BatchedSearch, Found, NBest, PreparedParams, ignore, refuse_nan
from jformer.inference.forced_pass import ForcedPass, WatchedPass, to_restore
from jformer.inference.generation import make_answer, make_setup
from jformer.inference.inputs import Inputs, writable
from jformer.inference.one_pass import HEADS
from jformer.inference.search_tree import refuse_without_beam, search_trees
from jformer.integrity import digest_of
from jformer.models.interventions import Intervention, intervene
from jformer.models.parts import count_params, overlaid, unshared
from jformer.parallel.mesh import make_mesh
from jformer.tasks.task import MASKS, SPAN, VECTOR

if TYPE_CHECKING:
    from jformer.config.options import Config
    from jformer.inference.restore import Trained


class Predictor:
    """A trained model and its tokenizers: `predict` answers texts, `score` rates answers, `embed` gives vectors."""

    def __init__(
        self,
        run: "Trained",
        members: "Sequence[Trained]" = (),
        mesh: Mesh | None = None,
        prepare: bool = True,
        base: "Predictor | None" = None,
    ) -> None:
        """Take a run; its `params` may be replaced during training.

        Args:
            run: a trained model.
            members: models of the same vocabulary that form an ensemble with it.
            mesh: its devices share the rows of a batch; None = everything is computed where the parameters are.
            prepare: keep a copy of the parameters from which answers are computed faster.
            base: the Predictor of the run that shares its parameters with `run`; they are copied once.
        """
        self._run = run
        self.config, self.task, self.tokenizers = run.config, run.task, run.tokenizers
        self.model, self.params, self.steps = run.model, run.params, run.steps
        self.members, self.mesh = members, mesh
        self.on_answered: Callable[[int], None] = ignore  # called with the number of newly answered inputs or pieces
        options, self.models = run.config.decode, (run.model, *(member.model for member in members))
        configs = [model.config for model in self.models]
        self.inputs = Inputs(options, run.task, run.tokenizers, configs, run.config.data)
        self._forced, self._watched = ForcedPass(self.models, self.inputs, mesh), WatchedPass(run.model, self.inputs)
        self._search: BatchedSearch | None = None
        self._base: Predictor | None = None
        self._split: PyTree = (None, None)  # the parameters, and those of the base, that `_own` was taken from
        if run.task.answer:
            searched = run.task.answer not in HEADS
            if base and base.task.answer and (base.task.answer not in HEADS) == searched:  # prepared alike
                self._base = base
            self._prepare = PreparedParams(self.models, mesh, rounded=searched, enabled=prepare)
            writes = searched or run.task.answer == MASKS
            vocabulary = writable(run.tokenizers[1], options, searched) if writes else np.ones(0, bool)
            self.setup = make_setup(self.models, options, vocabulary, self.inputs.symbols, mesh)
            self._search = BatchedSearch(make_answer(self.setup, run.task.answer), self.inputs, mesh)

    def __repr__(self) -> str:
        """Name the model and how it answers."""
        options, size = self.config.decode, count_params(self.params)
        search = f"beam_size={options.beam_size}" if options.search == "beam" else f"samples={options.samples}"
        model = f"{self.config.task} with {self.config.model.family} of {size:,} parameters"
        return f"<Predictor: {model}, steps={list(self.steps)}, search={options.search!r}, {search}>"

    def with_adapter(self, workdir: str | os.PathLike[str]) -> "Predictor":
        """Return the Predictor of a run of adapters whose base is this run; the parameters of the base are shared.

        It searches like this one, with the same interventions. Raises UserError for adapters of other parameters, and
        for an ensemble.
        """
        from jformer.inference.restore import restore_adapter

        self._refuse_ensemble("adapters modify one model, not an ensemble")
        mesh = self.mesh or make_mesh(1)
        return Predictor(restore_adapter(workdir, self._run, mesh), mesh=self.mesh, base=self)

    @property
    def counts(self) -> dict[str, int]:
        """How many inputs were cut, split, empty or unknown so far."""
        return self.inputs.counts

    @property
    def compile_seconds(self) -> float:
        """Seconds spent so far on the first batch of every shape, compiling included."""
        return self._forced.clock.seconds + (self._search.clock.seconds if self._search else 0.0)

    def forget(self) -> None:
        """Reset the counts and the statistics of output lengths, but keep compiled programs."""
        self.counts.clear()
        if self._search:
            self._search.forget()

    def fingerprint(self) -> str:
        """Return a digest of the parameters and vocabularies that answers depend on, members included."""
        from jformer.checkpoints.digests import digests

        own = [tokenizer.fingerprint for tokenizer in self.tokenizers]
        return digest_of([*own, *(digests(params) for params in self.all_params)])

    @property
    def all_params(self) -> tuple[PyTree, ...]:
        """The parameters of each of `models`."""
        return (self.params, *(member.params for member in self.members))

    @property
    def prepared_params(self) -> Sequence[PyTree]:
        """The parameters in the fastest form for searches; prepared once, those of a base together with it."""
        if self._base is None:
            return self._prepare(self.all_params)
        both = self.params, self._base.params
        if any(now is not before for now, before in zip(both, self._split, strict=True)):  # the first call, or replaced
            self._own, self._split = unshared(*both), both
        return [overlaid(self._base.prepared_params[0], self._prepare([self._own])[0])]

    def predict(self, texts: Iterable[str]) -> list[str]:
        """Answer every text, in order, with its translation, label or tags, or with its masks filled.

        A question comes with its context, a TAB between them; "" means that the context does not answer it. A run of
        mlm fills in masks, as its vocabulary spells them. An empty text stays empty, unless it is to be continued. An
        image is given by its path, as in data.image_files.

        Raises UserError for a task that has no answers, and for anything but a list of texts; only texts to be
        continued may have several lines.
        """
        if self.task.answer == VECTOR:
            raise UserError(
                f"task={self.config.task!r} answers a text with a vector: use embed(texts), or --mode=embed"
            )
        asked = check_texts(texts, "predict(['a text', 'another'])", one_line=not self.inputs.continues)
        return [outputs[0].text for outputs in self.generate(asked)]

    def generate(self, requests: Iterable[Request | str]) -> list[list[Output]]:
        """Answer every request or text, in order, with as many outputs as the options ask for, best first.

        Raises UserError for a task that has no answers, phrases that cannot be written, and NaN scores.
        """
        found: dict[int, list[Output]] = {}
        for some in self.arriving(requests):
            found |= some
        return [found[i] for i in range(len(found))]

    def arriving(self, requests: Iterable[Request | str]) -> Iterator[dict[int, list[Output]]]:
        """Yield number of a request → its outputs, batch by batch, in any order; raise as `generate` does."""
        usage = "generate(['a text', jformer.Request('another', prefix='begins so')])"
        asked = check_requests(requests, usage, one_line=not self.inputs.reads_blanks)
        if self._search is None:
            raise UserError(f"task={self.config.task!r} has no answer to a text; --mode=evaluate scores it")
        groups = self.inputs.pieces(asked)
        pieces = [piece for group in groups for piece in group]
        searched = self._search(self.prepared_params, pieces, self.on_answered)
        batches = whole_groups([*map(len, groups)], searched)
        if self.config.decode.ranked_by:  # a command is started once
            batches = iter([{i: each for some in batches for i, each in some.items()}])
        for some in batches:
            answers = self.answers([groups[i] for i in some], [each for found in some.values() for each in found])
            yield dict(zip(some, answers, strict=True))

    def answers(self, groups: Sequence[Sequence[Piece]], found: Sequence[Found]) -> list[list[Output]]:
        """Return the outputs for every request, given as its pieces, from the results for all pieces in order."""
        pieces = [piece for group in groups for piece in group]
        outputs = self._outputs(pieces, found)
        if self.config.decode.alignments:
            outputs = list(self._align(pieces, outputs))
        answers = iter(outputs)
        return [self._join([next(answers) for _ in group], group) for group in groups]

    def answers_to(self, pairs: Sequence[Pair]) -> list[str]:
        """Return the answer to the source of every pair; for vectors, the target nearest to it by cosine."""
        sources = [pair.source for pair in pairs]
        if self.task.answer != VECTOR:
            asked = [Request(pair.source, line=i, languages=pair.languages) for i, pair in enumerate(pairs)]
            return [outputs[0].text for outputs in self.generate(asked)]
        targets = list(dict.fromkeys(pair.target for pair in pairs))
        vectors = self.embed([*sources, *targets]).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        first, second = vectors[: len(sources)], vectors[len(sources) :]
        return [targets[int(np.argmax(second @ vector))] for vector in first]

    def embed(self, texts: Iterable[str]) -> Float[np.ndarray, "n d"]:
        """Return the embedding of every text, in order: its tokens pooled as decode.pooling says.

        For an encoder-decoder, the encoder's output is used. A text over the limit is cut and counted; an empty one has
        a vector, too. Other texts affect a vector only through the rounding of products.

        Raises UserError for anything but a list of texts, a run of images, an ensemble, and NaN in a vector.
        """
        asked = check_texts(texts, "embed(['a text', 'another'])", one_line=False)
        return stacked([output.vector for (output,) in self.embedder.generate(asked)], self.model.config.d_model)

    @property
    def embedder(self) -> "Predictor":
        """The Predictor of this run whose answers are vectors, as decode.pooling says; itself if they already are."""
        self._embedder.params = self.params  # they may have been replaced since
        return self._embedder

    @functools.cached_property
    def _embedder(self) -> "Predictor":
        from jformer.inference.restore import embedding_run

        self._refuse_ensemble("vectors of different models are not comparable")
        run = embedding_run(dataclasses.replace(self._run, params=self.params))
        if run.model == self.model:
            return self
        embedder = Predictor(run, mesh=self.mesh, base=self)
        embedder.inputs.counts = self.inputs.counts
        embedder.on_answered = lambda count: self.on_answered(count)
        return embedder

    def search_trees(self, requests: Iterable[Request | str]) -> list[list[SearchTree]]:
        """Return the beam search for every request or text, in order: a tree for each piece, none for empty text.

        The search is repeated in the same steps. Raises UserError as `generate` does, and for fewer than two beams.
        """
        refuse_without_beam(self.task.answer, self.config.decode)
        usage = "search_trees(['a text', jformer.Request('another', prefix='begins so')])"
        groups = self.inputs.pieces(check_requests(requests, usage, one_line=not self.inputs.continues))
        pieces = [piece for group in groups for piece in group]
        trees = iter(search_trees(self.setup, self.inputs, self.prepared_params, pieces))
        return [[next(trees) for _ in group] for group in groups]

    def score(self, pairs: Iterable[tuple[str, str] | Pair]) -> list[Scored]:
        """Return the log-probability of every (source, target) pair's target given its source, in order.

        A language model reads the target alone. A text over the training limits is cut, counted and marked. A pair may
        be a `Pair` with its languages.

        Raises UserError for a task without targets, for anything but a list of pairs of texts, and for NaN scores.
        """
        usage = "score([('a source', 'its target')])"
        checked = check_pairs(pairs, usage, one_line=not self.inputs.continues)
        if self.task.answer not in ("text", "continuation"):
            raise UserError(f"task={self.config.task!r} has no targets to score; --mode=evaluate scores its test sets")
        if self.config.decode.overlong == "split":
            raise UserError("decode.overlong='split' cannot score: a target is one text; use 'cut'")
        encoded = self.inputs.encode_pairs(checked)
        tokens, scored = self.tokenizers[1].tokens, []
        for pair, row in zip(encoded, self._forced(self.all_params, encoded, self.on_answered), strict=True):
            refuse_nan(row["log_probs"])
            log_probs, written = row["log_probs"].tolist(), tuple(tokens[i] for i in pair.target)
            scored.append(Scored(sum(log_probs), tuple(log_probs), written, pair.cut))
        return scored

    def attend(self, pairs: Iterable[tuple[str, str | None]]) -> list[Attended]:
        """Return the attention weights for every (source, target) pair, in order: all layers and heads of every part.

        A target of None is the run's own answer. A language model reads a target alone; without one, it continues the
        source. A label is a target. The answer to a question is words of its context; of several windows, the one with
        the answer is shown. A run of mlm or denoise reads a source alone, in which noise hides the same parts each
        time; its target is the text to restore.

        Raises UserError for an ensemble, whose members attend separately, for anything but a list of pairs of texts,
        and for NaN scores.
        """
        return self._watched(self.params, self._whole(pairs, "attend"))

    def activations(self, pairs: Iterable[tuple[str, str | None]], names: str | Sequence[str]) -> Iterator[Activations]:
        """Yield what the model computes inside for every (source, target) pair, in order, read as by `attend`.

        `names` are those of `jformer.models.interventions`, one or several; `*` stands for any part of one. Raises
        UserError as `attend` does, and for a name that no activation has.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        return self._watched.activations(self.params, self._whole(pairs, "activations"), names)

    def pair_of(self, line: str) -> tuple[str, str | None]:
        """Return the source and the target that a line has for `attend`, a TAB between them; a target may be left out.

        For mlm and denoise the line is a text. For question answering, the first TAB is part of the source. For a
        classifier, the last part is a target only if it is a label. Sources of several texts keep all their TABs.
        """
        if self.task.restores:
            return line, None
        if self.task.answer in ("label", "labels", "number"):
            texts, tab, last = line.rpartition("\t")
            return (texts, last) if tab and _is_label(last, self.tokenizers[1]) else (line, None)
        if self.task.answer != SPAN and self.inputs.encoder.source.parts:
            return line, None
        sources = 2 if self.task.answer == SPAN else 1
        parts = line.split("\t", sources)
        return "\t".join(parts[:sources]), parts[sources] if len(parts) > sources else None

    def intervene(self, interventions: Mapping[str, Intervention]) -> "Predictor":
        """Return a Predictor whose model has the named activations replaced by functions of them.

        A function of (activation, layer) sees the rows of a batch; in a search, it sees each beam, and only new
        positions. Raises UserError for a name that no activation has, and for an ensemble.
        """
        self._refuse_ensemble("interventions are of one model")
        run = dataclasses.replace(self._run, model=intervene(self.model, interventions), params=self.params)
        return Predictor(run, mesh=self.mesh, base=self)

    def _refuse_ensemble(self, why: str) -> None:
        if self.members:
            raise UserError(f"decode.ensemble: {why}; leave it out")

    def _whole(self, pairs: Iterable[tuple[str, str | None]], method: str) -> list[Pair]:
        """Return checked pairs with the run's own answers in place of missing targets; raise as `attend` does."""
        if self.task.answer == VECTOR:
            raise UserError(f"task={self.config.task!r}: {method} is for runs that write, label or tag")
        self._refuse_ensemble("the members of an ensemble attend separately")
        usage = f"{method}([('a source', 'its target'), ('another', None)])"
        checked = check_pairs(pairs, usage, one_line=not self.inputs.continues, answered=True)
        if self.task.restores:
            return to_restore(checked)
        given = [pair if isinstance(pair, Pair) else Pair(pair[0], cast(str, pair[1])) for pair in checked]
        missing = [pair for pair in given if pair.target is None]
        asked = [Request(pair.source, line=i, languages=pair.languages) for i, pair in enumerate(missing)]
        answers, whole = iter(self.generate(asked)), []
        for pair in given:
            own = next(answers)[0] if pair.target is None else Output(pair.target)
            whole.append(pair._replace(target=own.text, start=own.span[0] if own.span else None))
        return whole

    def _join(self, answers: Sequence[list[Output]], pieces: Sequence[Piece]) -> list[Output]:
        """Return the outputs for an input from those for its pieces."""
        join = HEADS[self.task.answer].join if self.task.answer in HEADS else None
        if join:
            return join(answers, self.config.decode)
        return join_outputs(answers, self.inputs.symbols.eos, written_language(self.config, pieces))

    def _outputs(self, pieces: Sequence[Piece], found: Sequence[Found]) -> list[list[Output]]:
        """Return the results for every piece as texts, best first."""
        options, both = self.config.decode, zip(pieces, found, strict=True)
        if self.task.answer in HEADS:
            return [HEADS[self.task.answer].read(each, self.tokenizers[1], piece) for piece, each in both]
        outputs = [self._candidates(piece, cast(NBest, each)) for piece, each in both]
        if options.search == "mbr" or options.rerank:
            from jformer.inference.ranking import by_utility  # imports sacreBLEU, which other searches do not need

            texts = [[self.tokenizers[1].decode(output.ids) for output in each] for each in outputs]
            outputs = by_utility(self.config, pieces, outputs, texts)
        outputs = [each[: options.returned] for each in outputs]
        written = [output.ids for each in outputs for output in each]
        self.counts[TRUNCATED] += sum(self.inputs.symbols.eos not in ids for ids in written)
        return [each or [self._output([], [], -math.inf)] for each in outputs]

    def _candidates(self, piece: Piece, found: NBest) -> list[Output]:
        """Return the outputs that a search has found for a piece."""
        prompt = piece.ids if self.task.answer == "continuation" else ()
        both = zip(found.tokens, found.scores, strict=True)
        return [self._output([*prompt, *ids], ids, value) for ids, value in both if ids]

    def _output(self, written: Sequence[int], ids: Sequence[int], value: float) -> Output:
        """Return ids as text, with the number that this kind of search computes."""
        text = self.tokenizers[1].decode(written)
        if self.config.decode.search == "beam":
            return Output(text, tuple(ids), score=value)
        return Output(text, tuple(ids), log_prob=value)

    def _align(self, pieces: Sequence[Piece], outputs: Sequence[Sequence[Output]]) -> Iterator[list[Output]]:
        """Yield the outputs for every piece, each token linked to the source token that it attends to most.

        End symbols, and tokens that attend to one, have no link.
        """
        sources, targets = (tokenizer.tokens for tokenizer in self.tokenizers)
        ends = self.inputs.side.symbols.eos, self.inputs.symbols.eos
        begun = [self.inputs.begun(piece) for piece, each in zip(pieces, outputs, strict=True) for _ in each]
        sides = [(piece.ids, output.ids) for piece, each in zip(pieces, outputs, strict=True) for output in each]
        pairs = [EncodedPair(ids, [*before, *own]) for before, (ids, own) in zip(begun, sides, strict=True)]
        rows = iter(zip(begun, pairs, self._forced(self.all_params, pairs, attend=True), strict=True))
        for each in outputs:
            aligned = []
            for output, (before, pair, row) in zip(each, rows, strict=False):
                links = enumerate(row["attention"].argmax(axis=-1).tolist()[len(before) :])
                kept = [s for s, i in enumerate(pair.source) if i != ends[0]]  # symbols may follow the end
                number = {s: i for i, s in enumerate(kept)}
                alignment = Alignment(
                    tuple((number[s], t) for t, s in links if s in number and output.ids[t] != ends[1]),
                    tuple(sources[pair.source[s]] for s in kept),
                    tuple(targets[i] for i in output.ids if i != ends[1]),
                )
                aligned.append(output._replace(alignment=alignment))
            yield aligned


def _is_label(text: str, labels: Tokenizer) -> bool:
    try:
        labels.encode([text])
    except UserError:
        return False
    return True


def stacked(vectors: Sequence[Any], size: int) -> Float[np.ndarray, "n d"]:
    """Return vectors as one f32 array, which has no rows if there are none."""
    return np.stack(vectors) if len(vectors) else np.zeros((0, size), np.float32)


def load(workdir: str | os.PathLike[str], overrides: "Config | None" = None, mesh: Mesh | None = None) -> Predictor:
    """Return the Predictor of a trained run; `overrides` replaces its saved config, to change decoding.

    With decode.ensemble, the runs named there form an ensemble with this one, each with the weights named by its own
    config. All compute in decode.dtype. The devices of the mesh share the rows of a batch: those that `overrides` lays
    out, or all devices. The run may have been trained on any number of devices.

    Raises UserError for an ensemble run of another task or vocabulary, and for one of a task without a search.
    """
    from jformer.inference.restore import decoding_mesh, restore_member, restore_to_answer

    mesh = mesh or decoding_mesh(overrides)
    run = restore_to_answer(workdir, overrides, mesh)
    if run.config.decode.ensemble and run.task.answer in HEADS:  # of your own task, the config does not know this
        raise UserError(
            f"decode.ensemble is read by searches, but task={run.config.task!r} answers in one pass: leave it out"
        )
    members = [restore_member(other, run, mesh) for other in run.config.decode.ensemble]
    return Predictor(run, members, mesh)
