"""Forced passes over given targets: their log-probabilities, and the attention of the model.

Letters in shapes: b rows of a batch, t target positions, s source positions, d d_model, v entries of the vocabulary,
l layers, h heads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PyTree

from jformer.data.sources.split import Pair
from jformer.data.spans import END, START
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.errors import UserError
from jformer.inference.answers import Activations, Attended, AttentionWeights, Choice, EncodedPair, Part
from jformer.inference.batching import CompileClock, batch_rows, ignore, refuse_nan, shapes_of, sorted_batches
from jformer.inference.generation import KEPT, TOKENS, mean_logits
from jformer.inference.inputs import Inputs
from jformer.inference.one_pass import marked_pair
from jformer.models.batch import Batch
from jformer.models.interventions import activations
from jformer.models.model import Model
from jformer.parallel.activations import constrain_sharding
from jformer.parallel.backend import Target, target
from jformer.parallel.sharding import over_rows
from jformer.plugins import cached
from jformer.tasks.crf import allowed_states, pair_shares
from jformer.tasks.losses import span_log_probs
from jformer.tasks.noise import MASK, SENTINEL
from jformer.tasks.task import CLASSES, MASKS

Scorer = Callable[[Sequence[PyTree], Mapping[str, np.ndarray]], dict[str, Array]]
LIKELIEST = 5  # tokens shown for every position
BLOCKS = {  # part → where the weights of a Transformer's layers are
    Part.ENCODER_SELF: ("encoder", "self_attn"),
    Part.DECODER_SELF: ("decoder", "self_attn"),
    Part.CROSS: ("decoder", "cross_attn"),
}


def make_scorer(
    models: Sequence[Model], average: str, mesh: Mesh | None = None, attend: bool = False, tokens: int = TOKENS
) -> Scorer:
    """Return the compiled (parameters of each model, batch) → {"log_probs": f32 [b t], "attention": f32 [b t s]}.

    The batch has both sides as in training. A token's log-probability is given all before it, over the whole
    vocabulary; an ensemble is averaged as in a search. Programs are cached by these arguments.

    Args:
        models: an ensemble.
        average: whether the mean is of their probabilities or of their log-probabilities.
        mesh: its data and fsdp axes split the rows.
        attend: whether to return what the decoder's last layer attends to in the source as it predicts each token,
            averaged over heads and models.
        tokens: how many are projected to the vocabulary at a time.
    """
    return _make_scorer(tuple(models), average, mesh, attend, tokens, target())


@cached(KEPT)
def _make_scorer(
    models: tuple[Model, ...], average: str, mesh: Mesh | None, attend: bool, tokens: int, traced_for: Target
) -> Scorer:
    def score(params: Sequence[PyTree], batch: Batch) -> dict[str, Array]:
        passes = [_forced(model, tree, batch, attend) for model, tree in zip(models, params, strict=True)]
        hidden = [states for states, _ in passes]

        def row(one: tuple[list[Float[Array, "t d"]], Int[Array, " t"]]) -> Float[Array, " t"]:
            states, targets = one
            each = [_logits(*member) for member in zip(models, params, states, strict=True)]
            log_probs = jax.nn.log_softmax(mean_logits(each, average))
            return jnp.take_along_axis(log_probs, targets[:, None], axis=-1)[:, 0]

        log_probs = jax.lax.map(row, (hidden, batch["target_out"]), batch_size=max(1, tokens // hidden[0].shape[1]))
        scores = {"log_probs": jnp.where(batch["weights"] > 0, log_probs, 0.0)}
        if attend:
            scores["attention"] = jnp.mean(jnp.stack([weights for _, weights in passes]), axis=0)
        return scores

    return jax.jit(over_rows(score, mesh))


def _forced(model: Any, params: PyTree, batch: Batch, attend: bool) -> tuple[Float[Array, "b t d"], Any]:
    """Return the hidden states, and f32 [b t s], the weights of the last layer's attention to the source, or None."""
    if not attend:
        return model.apply({"params": params}, batch, method="hidden"), None
    hidden, seen = watched_pass(model, params, batch)
    return hidden, model.cross_weights(seen)


def watched_pass(model: Model, params: PyTree, batch: Batch) -> tuple[Float[Array, "b t d"], PyTree]:
    """Return the hidden states of given targets, and the attention weights that the model records."""
    hidden, seen = model.apply({"params": params}, batch, method="hidden", mutable=["intermediates"])
    return hidden, seen.get("intermediates", {})


def _logits(model: Model, params: PyTree, hidden: Float[Array, "t d"]) -> Float[Array, "t v"]:
    logits = model.apply({"params": params}, hidden[None], method="logits")[0]
    return constrain_sharding(logits.astype(jnp.float32))  # whole on every device, to gather targets from


class ForcedPass:
    """A compiled forced pass over any number of encoded pairs, in batches."""

    def __init__(self, models: Sequence[Model], inputs: Inputs, mesh: Mesh | None) -> None:
        """Compile nothing yet."""
        self._models, self._inputs, self._mesh = models, inputs, mesh
        self.clock = CompileClock()

    def __call__(
        self,
        params: Sequence[PyTree],
        pairs: Sequence[EncodedPair],
        on_scored: Callable[[int], None] = ignore,
        attend: bool = False,
    ) -> list[dict[str, np.ndarray]]:
        """Return the arrays of `make_scorer` for each pair's target, token by token, in order.

        `on_scored` is given the number of pairs of each batch that is done.
        """
        options = self._inputs.options
        score = make_scorer(self._models, options.ensemble_average, self._mesh, attend)
        results: list[dict[str, np.ndarray]] = [{} for _ in pairs]
        rows = batch_rows(len(pairs), options.batch_size, self._mesh)
        for indices in sorted_batches([*map(self._inputs.pair_length, pairs)], rows):
            batch = self._inputs.pair_arrays([pairs[i] for i in indices], rows)
            with self.clock.batch((attend, *shapes_of(batch))):
                arrays = jax.device_get(score(params, batch))
            for row, i in enumerate(indices):
                begin = self._inputs.begin(pairs[i].source)
                end = begin + len(pairs[i].target)
                results[i] = {name: values[row, begin:end] for name, values in arrays.items()}
            on_scored(len(indices))
        return results


class WatchedPass:
    """A compiled forced pass that records attention, for any number of sources with their targets."""

    def __init__(self, model: Model, inputs: Inputs) -> None:
        """Compile nothing yet."""
        self._model, self._inputs = model, inputs

    def __call__(self, params: PyTree, pairs: Sequence[Pair]) -> list[Attended]:
        """Return the attention for every pair, in order; for a context in windows, the one with the answer is used.

        Raises UserError for NaN scores, and for a pair that the task cannot read.
        """
        forced = _make_pass(self._model, self._inputs.task.answer)
        found = []
        for pair, batch in zip(pairs, self._batches(pairs), strict=True):
            seen, likely = jax.device_get(forced(params, batch))
            refuse_nan(likely)
            parts = {part.part: part for part in self._parts(batch, seen)}
            found.append(
                Attended(
                    source=pair.source,
                    target=pair.target,
                    encoder=parts.get(Part.ENCODER_SELF),
                    decoder=parts.get(Part.DECODER_SELF),
                    cross=parts.get(Part.CROSS),
                    choices=self._choices(batch, likely[0]),
                    image=batch["image"][0] if "image" in batch else None,
                )
            )
        return found

    def activations(self, params: PyTree, pairs: Sequence[Pair], names: tuple[str, ...]) -> Iterator[Activations]:
        """Yield the named activations for every pair, in order; raise UserError for a name without an activation."""
        record = _make_recorder(self._model, names)
        axes: dict[str, dict[str, set[int]]] = {}
        for batch in self._batches(pairs):
            axes = axes or _axes(record, params, batch)
            source, target = self._source(batch), self._labels(batch, "target_in")
            lengths, arrays = {"source": len(source), "target": len(target)}, {}
            for name, value in jax.device_get(record(params, batch)).items():
                shown = value if value.dtype == bool else value.astype(np.float32)
                for side, length in lengths.items():
                    for axis in axes[side][name]:
                        shown = shown.take(range(length), axis)
                arrays[name] = shown.squeeze(tuple(axes["rows"][name]))
            yield Activations(source, target, arrays)

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[dict[str, np.ndarray]]:
        """Yield a batch for every pair; if the task restores parts of a text, noise hides some of its target."""
        if self._inputs.task.restores:
            texts = self._inputs.encode_whole([pair.target for pair in pairs])
            yield from (self._inputs.noised_arrays([ids]) for ids in texts)
            return
        if self._inputs.task.answer == "span":
            encoded = [EncodedPair(*marked_pair(self._inputs.encoder, pair)) for pair in pairs]
        else:
            encoded = self._inputs.encode_pairs(pairs)
        yield from (self._inputs.pair_arrays([each], 1) for each in encoded)

    def _parts(self, batch: Mapping[str, np.ndarray], seen: Mapping[str, Any]) -> Iterator[AttentionWeights]:
        """Yield the weights of every part that attends, without padding."""
        source, read, written = self._source(batch), self._labels(batch, "target_in"), self._labels(batch, "target_out")
        labels = {
            Part.ENCODER_SELF: (source, source),
            Part.DECODER_SELF: (read, read),
            Part.CROSS: (written, source),  # each row belongs to the token that it helps to predict
        }
        for part, (weights, mask) in _arrays(seen).items():
            rows, columns = labels[part]
            shown = ..., slice(len(rows)), slice(len(columns))
            yield AttentionWeights(
                part=part, weights=weights[:, 0][shown], mask=mask[0][shown], rows=rows, columns=columns
            )

    def _source(self, batch: Mapping[str, np.ndarray]) -> tuple[str, ...]:
        if "image" not in batch:
            return self._labels(batch, "source")
        model = self._model.config
        class_token = ("class",) if model.family == "vit" and model.head.pooling == "first" else ()
        return class_token + tuple(model.vision.patch_names)

    def _labels(self, batch: Mapping[str, np.ndarray], name: str) -> tuple[str, ...]:
        """Return the tokens of one side of a batch's only row, as the vocabulary writes them."""
        side = 0 if name == "source" else 1
        segments = batch.get(f"{('source', 'target')[side]}_segments")
        if segments is None:
            return ()
        return self._written(side, batch[name][0][segments[0] > 0].tolist())

    def _written(self, side: int, ids: Sequence[int]) -> tuple[str, ...]:
        tokens, symbols = self._inputs.tokenizers[side].tokens, self._inputs.task.symbols
        names = [MASK] if symbols == 1 else [SENTINEL.format(i) for i in range(symbols)]
        written = (*tokens, *names)
        return tuple(written[i] if i < len(written) else f"<{i}>" for i in ids)  # a model may have further rows

    def _choices(self, batch: Mapping[str, np.ndarray], likely: np.ndarray) -> tuple[Choice, ...]:
        """Return the choice at every position that predicts something, or of every label, or of both ends of a span.

        Classes are numbered from 0. A number has no alternatives. Without a target, the source hides what is
        predicted.
        """
        answer, wanted = self._inputs.task.answer, batch["target_out"][0]
        if answer == "number":
            return ()
        if answer == "span":
            return self._ends(batch, likely)
        places = [(int(t), int(wanted[t])) for t in np.flatnonzero(batch["weights"][0])]
        if answer == "labels":
            places = [(0, int(label)) for label in np.flatnonzero(wanted)]
        first, choices = NUM_SYMBOLS if answer in CLASSES else 0, []
        read = self._labels(batch, "source") if answer == MASKS else ()
        for t, right in places:
            best = np.argsort(-likely[t])[:LIKELIEST].tolist()
            token, *others = self._written(1, [first + i for i in (right, *best)])
            choice = _choice(token, others, likely[t], right, best)
            choices.append(choice._replace(read=read[t]) if read else choice)
        return tuple(choices)

    def _ends(self, batch: Mapping[str, np.ndarray], likely: np.ndarray) -> tuple[Choice, ...]:
        """Return the choices of an answer's start and end by `likely` f32 [s 2]; the first position means no answer."""
        tokens = ("no answer", *self._labels(batch, "source")[1:])
        choices = []
        for side, (name, mark) in enumerate({"start": START, "end": END}.items()):
            place = int(np.flatnonzero(batch["target_out"][0] & mark)[0])
            best = np.argsort(-likely[: len(tokens), side])[:LIKELIEST].tolist()
            others = [tokens[i] for i in best]
            choices.append(_choice(f"{name}: {tokens[place]}", others, likely[:, side], place, best))
        return tuple(choices)


def to_restore(pairs: Sequence[tuple[str | None, str | None]]) -> list[Pair]:
    """Return source texts as the targets of a task that hides parts of them.

    Raises UserError for an empty one, and where there is a target.
    """
    for text, answer in pairs:
        if answer is not None or not (text or "").strip():
            raise UserError("a run of mlm or denoise takes texts without targets: attend([('a text', None)])")
    return [Pair("", text or "") for text, _ in pairs]


def _choice(token: str, others: Sequence[str], likely: np.ndarray, target: int, best: Sequence[int]) -> Choice:
    return Choice(
        token, float(likely[target]), tuple((other, float(likely[i])) for other, i in zip(others, best, strict=True))
    )


@cached(KEPT)
def _make_pass(model: Model, answer: str) -> Any:
    """Return the compiled (parameters, batch) → (intermediates, probabilities [b t v]).

    Probabilities of a row sum to one, except those of several labels, which are independent, and those of a span
    [b s 2], which sum to one over the positions of either end.
    """

    def forced(params: PyTree, batch: Batch) -> tuple[Any, jax.Array]:
        hidden, seen = watched_pass(model, params, batch)
        logits = model.apply({"params": params}, hidden, method="logits")
        if answer == "span":
            return seen, jnp.exp(span_log_probs(logits, batch["target_out"]))
        if model.config.head.crf:
            allowed = allowed_states(batch, logits.shape[-1])
            return seen, pair_shares(logits, allowed).sum(axis=2)[..., :-1]
        likely = jax.nn.sigmoid if answer == "labels" else jax.nn.softmax
        return seen, likely(logits.astype(jnp.float32))

    return jax.jit(forced)


@cached(KEPT)
def _make_recorder(model: Model, names: tuple[str, ...]) -> Any:
    """Return the compiled (parameters, batch) → name → activation."""
    return jax.jit(lambda params, batch: activations(model, params, batch, names))


def _axes(record: Any, params: PyTree, batch: Mapping[str, np.ndarray]) -> dict[str, dict[str, set[int]]]:
    """Return which axes of each activation are those of rows, source and target: those that grow with them."""

    def shapes(side: str, axis: int) -> dict[str, tuple[int, ...]]:
        def longer(name: str, array: np.ndarray) -> jax.ShapeDtypeStruct:
            shape = [size + (i == axis and name.startswith(side)) for i, size in enumerate(array.shape)]
            return jax.ShapeDtypeStruct(shape, array.dtype)

        found = jax.eval_shape(record, params, {name: longer(name, array) for name, array in batch.items()})
        return {name: array.shape for name, array in found.items()}

    def grown(side: str, axis: int) -> dict[str, set[int]]:
        after = shapes(side, axis)
        return {name: {i for i, size in enumerate(shape) if size != after[name][i]} for name, shape in before.items()}

    before = shapes("", -1)
    return {"rows": grown("", 0), "source": grown("source", 1), "target": grown("target", 1)}


def _arrays(seen: Mapping[str, Any]) -> dict[Part, tuple[np.ndarray, np.ndarray]]:
    """Return the weights [l b h t s] of each part that attends, and the mask [b t s] of its layers."""
    if "cross_weights" in seen:  # of a recurrent model: one layer, one head
        (weights,) = seen["cross_weights"]
        return {Part.CROSS: (weights[None, :, None], np.ones(weights.shape, bool))}
    blocks = {part: seen.get(stack, {}).get("block", {}).get(name, {}) for part, (stack, name) in BLOCKS.items()}
    return {part: (found["weights"][0], found["mask"][0][0, :, 0]) for part, found in blocks.items() if found}
