"""Check that a run answers correctly: several ways to compute the same numbers must agree.

Letters in shapes: b inputs, t positions, v entries of the vocabulary or classes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from etils.epath import Path
from jaxtyping import Array, Bool, Float, PyTree

from jformer.config.options import Config
from jformer.data.progress import counted, show_progress
from jformer.data.sources import open_split
from jformer.data.tokenizers import NUM_SYMBOLS, ImageTokenizer
from jformer.decoding.decode_config import DecodeConfig
from jformer.decoding.hypotheses import length_penalty
from jformer.errors import UserError
from jformer.inference.answers import EncodedPair, Piece, Request
from jformer.inference.batching import NBest, read_row
from jformer.inference.forced_pass import make_scorer
from jformer.inference.generation import make_answer, make_setup, start_cache
from jformer.inference.inputs import writable
from jformer.inference.predict import Predictor, load
from jformer.models import build_model
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.models.text_vectors import TEXTS
from jformer.parallel.backend import target
from jformer.parallel.devices import arithmetic, products_line
from jformer.parallel.mesh import make_mesh

SENTENCES, BEAMS = 16, 4
FEW, PADDING = 3, 8  # inputs of a smaller batch, and its additional positions
OPTIONS = ("length_penalty", "length_offset", "dtype", "source_language", "target_language")  # of decoding, as given
READ = {*Batch.__annotations__} - {"target_out", "weights", "row"}  # arrays that a model reads
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.2}  # of a log-probability or a logit, by the arithmetic of products

Answers = list[list[tuple[list[int], float]]]
"""For every input its outputs, best first: tokens and score."""


class Check(NamedTuple):
    """One row of the table of checks."""

    name: str
    what: str  # what the deviation measures
    run: Callable[["Subject"], float]  # → the largest deviation
    applies: Callable[["Subject"], bool] = lambda subject: subject.searches


class Subject:
    """A run, some inputs, and several ways to answer them."""

    def __init__(self, predictor: Predictor, settings: DecodeConfig) -> None:
        """Take the first inputs of the first test set or, if that cannot be read, random tokens."""
        self.model, self.params, self.task = predictor.model, predictor.params, predictor.task
        self.config, self.tokenizers, self.options = predictor.config, predictor.tokenizers, settings
        self.inputs = predictor.inputs
        self.searches: bool = self.task.answer in ("text", "continuation")
        self.mask = writable(self.tokenizers[1], settings) if self.searches else np.ones(0, bool)
        self.pieces, self.origin = self._find(self.config)

    def _find(self, config: Config) -> tuple[list[Piece], str]:
        named = next(iter(config.data.test_sets().items()), None)
        if named is None:
            return [Piece(ids, i) for i, ids in enumerate(self._random())], "random tokens, for data.test names no set"
        name, (part, split) = named
        try:
            pairs = list(islice(open_split(part, split).read(Counter()), SENTENCES))
            if self.task.restores:  # noise hides parts of a text, which is a target
                whole = self.inputs.encode_whole([pair.target for pair in pairs])
                pieces = [Piece(ids, i) for i, ids in enumerate(whole)]
            else:
                texts = [pair.target if self.inputs.continues else pair.source for pair in pairs]
                texts = [text[: 8 if self.inputs.continues else None] for text in texts]
                own = config.data.languages(part)
                languages = self.options.source_language or own[0], self.options.target_language or own[1]
                requests = [Request(text, line=i, languages=languages) for i, text in enumerate(texts)]
                pieces = [piece for found in self.inputs.pieces(requests) for piece in found]
            if not pieces:
                raise UserError(f"test set {name!r} begins with no text")
            return pieces, f"of test set {name!r}"
        except UserError as error:
            return [Piece(ids, i) for i, ids in enumerate(self._random())], f"random tokens, for {error}"

    def _random(self) -> list[list[int]]:
        """Return random sources, or texts to continue, as tokens or as pixels of images."""
        rng = np.random.default_rng(0)
        source = self.tokenizers[0]
        if isinstance(source, ImageTokenizer):
            return [rng.integers(0, source.vocab_size, source.length).tolist() for _ in range(SENTENCES)]
        most = min(20, max(4, min(self.config.data.max_source_length, self.config.data.max_target_length) - 2))
        texts = [rng.integers(NUM_SYMBOLS, source.vocab_size, rng.integers(3, most)).tolist() for _ in range(SENTENCES)]
        end = [] if self.inputs.continues else [self.inputs.side.symbols.eos]
        return [[*ids, *end] for ids in texts]

    def batch(self) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return the arrays that the model reads for each input, and where its output begins.

        A search's greedy outputs are its targets. Where parts of a text are restored, noise hides some of the inputs.
        """
        begins = [0] * len(self.pieces)
        if self.searches:
            arrays, begins = self.forced([best[0][0] for best in self.answer(1)])
        elif self.task.restores:
            arrays = self.inputs.noised_arrays([piece.ids for piece in self.pieces])
        else:
            arrays, _ = self.inputs.arrays(self.pieces, len(self.pieces))
        return {name: array for name, array in arrays.items() if name in READ}, begins

    def logits(self, batch: dict[str, np.ndarray]) -> Float[np.ndarray, "b t *v"]:
        """Return the logits of a full pass."""
        return np.asarray(jax.jit(self.model.apply)({"params": self.params}, batch), np.float32)

    def predicted(self, batch: dict[str, np.ndarray]) -> Bool[np.ndarray, "b t"]:
        """Return the positions that are not padding, of the logits of a batch."""
        if self.model.config.pooled:
            texts = TEXTS if self.model.config.head.vectors else 1  # in a row, of which only the first is present
            return np.arange(texts) < np.ones((len(self.pieces), 1))
        return batch["source_segments" if self.model.config.family == "encoder" else "target_segments"] > 0

    def answer(self, beam_size: int, rows: int = SENTENCES, copies: int = 1, order: int = 1) -> Answers:
        """Search with these numbers of beams, rows, and copies of the model; `order` -1 answers the last input first.

        Raises UserError for a model whose logits are NaN.
        """
        options = dataclasses.replace(self.options, beam_size=beam_size, n_best=beam_size)
        setup = make_setup((self.model,) * copies, options, self.mask, self.inputs.symbols)
        search = make_answer(setup, self.task.answer)
        found: Answers = []
        pieces = self.pieces[::order]
        for start in range(0, len(pieces), rows):
            batch, room = self.inputs.arrays(pieces[start : start + rows], rows)
            decoded = jax.device_get(search((self.params,) * copies, batch, room))
            for row in range(len(pieces[start : start + rows])):
                outputs = read_row(decoded, row)
                assert isinstance(outputs, NBest)
                found.append([output for output in zip(*outputs, strict=True) if output[0]])
        return found[::order]

    def forced(self, outputs: Sequence[Sequence[int]]) -> tuple[dict[str, np.ndarray], list[int]]:
        """Return the arrays of each input with an output, as in training, and where the outputs begin."""
        before = [piece.ids if self.inputs.continues else self.inputs.begun(piece) for piece in self.pieces]
        sources = [[] if self.inputs.continues else piece.ids for piece in self.pieces]
        targets = [[*prompt, *ids] for prompt, ids in zip(before, outputs, strict=True)]
        batch = self.inputs.pair_arrays(list(map(EncodedPair, sources, targets)), len(targets))
        return batch, [self.inputs.begin(ids) + len(prompt) for ids, prompt in zip(sources, before, strict=True)]


def verify(config: Config, workdir: Path, further: Sequence[Check] = ()) -> bool:
    """Print a table of the checks that apply to a run and of further ones, and return whether all passed.

    Products of float32 have the highest precision, so that the checks find errors rather than a platform's rounding.
    """
    options = DecodeConfig(**{key: getattr(config.decode, key) for key in OPTIONS})
    with show_progress("loading the run"):
        model = dataclasses.replace(config.model, precision="highest")
        predictor = load(workdir, dataclasses.replace(config, decode=options, model=model), make_mesh(1))
    subject = Subject(predictor, options)
    used = predictor.model.config.dtype, target(), predictor.model.config.precision
    print(f"{counted(len(subject.pieces), 'inputs')} ({subject.origin}), {products_line(*used)}")
    passed = [report(check, subject, TOLERANCE[arithmetic(*used)]) for check in (*checks_of(subject), *further)]
    print(f"{sum(passed)} of {len(passed)} checks passed")
    return all(passed)


def checks_of(subject: Subject) -> list[Check]:
    """Return the checks that apply to a run."""
    return [check for check in CHECKS if check.applies(subject)]


def report(check: Check, subject: Subject, tolerance: float) -> bool:
    """Run a check, print its row and return whether it passed; a NaN deviation fails."""
    with show_progress(f"checking: {check.name}"):
        deviation = check.run(subject)
    passed = deviation <= tolerance
    verdict = "pass" if passed else "FAIL"
    print(f"{verdict}  {check.name:58} {deviation:8.1e}  (at most {tolerance:.0e}, of {check.what})", flush=True)
    return passed


def cached_and_uncached_logits(subject: Subject) -> float:
    """Compare the logits of a full pass over some outputs with those of a cache that is filled as in a search."""
    batch, begins = subject.batch()
    given = np.arange(batch["target_in"].shape[1]) < np.array(begins)[:, None]
    stepped = jax.jit(stepwise_logits, static_argnums=0)(subject.model, subject.params, batch, given)
    written = subject.predicted(batch) & ~given
    return _largest((subject.logits(batch) - np.asarray(stepped, np.float32))[written])


def stepwise_logits(
    model: Model, params: PyTree, batch: dict[str, Array], given: Bool[Array, "b t"]
) -> Float[Array, "b t v"]:
    """Return the logits of a batch of targets from the cache: of the prompt at once, then token by token."""

    def apply(*args: Any, method: str) -> Any:
        return model.apply({"params": params}, *args, method=method)

    rows, length = batch["target_in"].shape
    cache = start_cache(apply, cast(Batch, batch), rows, 2 * length)
    hidden, cache = apply(cache, batch["target_in"], given, method="extend")
    first, real = apply(hidden, method="logits"), (batch["target_segments"] > 0) & ~given

    def step(cache: Any, column: tuple[Array, Array]) -> tuple[Any, Array]:
        tokens, valid = column
        hidden, cache = apply(cache, tokens[:, None], valid[:, None], method="extend")
        return cache, apply(hidden, method="logits")[:, 0]

    _, logits = jax.lax.scan(step, cache, (batch["target_in"].T, real.T))
    return jnp.where(given[..., None], first, jnp.swapaxes(logits, 0, 1))


def greedy_and_likeliest(subject: Subject) -> float:
    """Return how far any token of one beam's outputs is from the most probable allowed one of a full pass."""
    outputs = [best[0][0] for best in subject.answer(1)]
    batch, begins = subject.forced(outputs)
    logits = subject.logits(batch)
    allowed = np.pad(subject.mask, (0, logits.shape[2] - len(subject.mask)))
    gaps = []
    for row, begin, ids in zip(logits, begins, outputs, strict=True):
        predicted = row[begin : begin + len(ids)]
        gaps.append(predicted[:, allowed].max(axis=1) - predicted[np.arange(len(ids)), ids])
    return _largest(np.concatenate(gaps))


def alone_and_together(subject: Subject) -> float:
    """Compare the scores of inputs answered in one batch with those in small ones, in another order and padding."""
    return _apart(subject.answer(BEAMS), subject.answer(BEAMS, rows=3, order=-1))


def ensemble_and_single(subject: Subject) -> float:
    """Compare the scores of two copies of the model as an ensemble with those of one."""
    return _apart(subject.answer(BEAMS), subject.answer(BEAMS, copies=2))


def searched_and_forced(subject: Subject) -> float:
    """Compare the scores of all outputs of a beam with what a forced pass gives for their tokens."""
    answers, worst = subject.answer(BEAMS), [0.0]
    score = make_scorer((subject.model,), subject.options.ensemble_average)
    for rank in range(min(map(len, answers))):
        outputs = [hypotheses[rank][0] for hypotheses in answers]
        batch, begins = subject.forced(outputs)
        log_probs = np.asarray(score((subject.params,), batch)["log_probs"])
        for row, begin, hypotheses in zip(log_probs, begins, answers, strict=True):
            ids, given = hypotheses[rank]
            penalty = float(length_penalty(jnp.array(len(ids)), subject.options))
            worst.append(abs(row[begin : begin + len(ids)].sum() - given * penalty) / len(ids))
    return _largest(np.array(worst))


def rows_alone_and_together(subject: Subject) -> float:
    """Compare the logits of all inputs in one batch with those in small ones, in another order and padding."""
    batch, _ = subject.batch()
    together, rows = subject.logits(batch), np.arange(len(subject.pieces))[::-1]
    real, alone = subject.predicted(batch), np.zeros_like(together)
    for start in range(0, len(rows), FEW):
        some = np.resize(rows[start : start + FEW], FEW)  # one shape to compile
        small = {name: _padded(array[some]) for name, array in batch.items()}
        alone[some] = subject.logits(small)[:, : together.shape[1]]
    return _largest((alone - together)[real])


def packed_and_unpacked(subject: Subject) -> float:
    """Compare the logits of inputs that share a row in pairs with those of inputs in rows of their own."""
    batch, _ = subject.batch()
    single, shared = subject.logits(batch)[subject.predicted(batch)], pack_rows(batch)
    config = subject.model.config  # a model may take rows for one text
    several = dataclasses.replace(config, execution=dataclasses.replace(config.execution, rows="several"))
    packed = jax.jit(build_model(several).apply)({"params": subject.params}, shared)
    return _largest(np.asarray(packed, np.float32)[subject.predicted(shared)] - single)


def pack_rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of a batch with every second row appended to the one before as another segment."""
    packed = {}
    for name, array in batch.items():
        segments = f"{name.partition('_')[0]}_segments"
        lengths, (rows, width) = (batch[segments] > 0).sum(axis=1), array.shape
        packed[name] = np.zeros((-(-rows // 2), 2 * width), array.dtype)
        for row, length in enumerate(lengths):
            start = lengths[row - 1] if row % 2 else 0
            values = array[row, :length] if name != segments else 1 + row % 2
            packed[name][row // 2, start : start + length] = values
    return packed


def _padded(array: np.ndarray) -> np.ndarray:
    """Return an array of a batch with more padding at the end of every row; images have none."""
    return np.pad(array, [(0, 0), (0, PADDING)]) if array.ndim == 2 else array


def _apart(one: Answers, other: Answers) -> float:
    """Return the largest difference of best scores; outputs may differ where scores are equal."""
    return _largest(np.array([a[0][1] - b[0][1] for a, b in zip(one, other, strict=True)]))


def _largest(differences: np.ndarray) -> float:
    return float(np.abs(differences).max())


def _one_pass(subject: Subject) -> bool:
    return not subject.searches


def _packs(subject: Subject) -> bool:
    """Whether texts may share a row: not if a state would run through them, nor for images and pooled texts."""
    config = subject.model.config
    return not (config.pooled or config.reads_images or config.recurrent.cell)


CHECKS = (
    Check("cached = uncached logits", "a logit", cached_and_uncached_logits, lambda it: it.model.config.decodes),
    Check("one beam = greedy, the likeliest of uncached logits", "a logit", greedy_and_likeliest),
    Check("alone = together: batch, order and padding change nothing", "a score", alone_and_together),
    Check("alone = together: batch, order and padding change nothing", "a logit", rows_alone_and_together, _one_pass),
    Check("packed = unpacked: texts that share a row", "a logit", packed_and_unpacked, _packs),
    Check("two copies of the model together = one", "a score", ensemble_and_single),
    Check("scores of the search = forced re-scoring of its outputs", "a token's log-probability", searched_and_forced),
)
