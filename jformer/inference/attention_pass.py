"""Forced passes over given texts that show what a model attends to, and what else it might have written.

Letters in shapes: l layers, h heads, t positions that attend, s positions attended to, b rows of a batch.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jformer.data.sources.split import Pair
from jformer.data.spans import END, START
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.errors import UserError
from jformer.inference.answer_spans import marked_pair
from jformer.inference.answers import EncodedPair
from jformer.inference.attention_types import Attended, Attention, Choice, Labels, Part
from jformer.inference.batching import refuse_nan
from jformer.inference.compiled_searches import KEPT
from jformer.inference.inputs import Inputs
from jformer.inference.scoring import watched_pass
from jformer.models.batch import Batch
from jformer.models.model import Model
from jformer.tasks.crf import allowed_states, pair_shares
from jformer.tasks.losses import span_log_probs
from jformer.tasks.task import CLASSES, SPAN

LIKELIEST = 5  # tokens that are told for every position
MASK, SENTINEL = "<mask>", "<extra_id_{}>"  # as BART and T5 call theirs: what noise puts in past the vocabulary
BLOCKS = {  # part → where the weights of a Transformer's layers are
    Part.ENCODER_SELF: ("encoder", "self_attn"),
    Part.DECODER_SELF: ("decoder", "self_attn"),
    Part.CROSS: ("decoder", "cross_attn"),
}


class WatchedPass:
    """A compiled forced pass that tells what it attends to, over any number of sources with their targets."""

    def __init__(self, model: Model, inputs: Inputs) -> None:
        """Hold what it takes, and compile nothing yet."""
        self._model, self._inputs = model, inputs

    def __call__(self, params: PyTree, pairs: Sequence[Pair]) -> list[Attended]:
        """Return what is attended to in every pair, in order; of a context in windows, in the one with the answer.

        Raises UserError for scores that are no numbers, and for what is no pair of the task.
        """
        forced = _make_pass(self._model, self._inputs.task.answer)
        found = []
        for pair, batch in zip(pairs, self._batches(pairs), strict=True):
            seen, likely = jax.device_get(forced(params, batch))
            refuse_nan(likely.max(axis=-1).ravel().tolist())
            parts = {part.part: part for part in self._parts(batch, seen)}
            image = batch["image"][0] if "image" in batch else None
            encoder, decoder, cross = (parts.get(part) for part in Part)
            choices = self._choices(batch, likely[0])
            found.append(
                Attended(
                    source=pair.source,
                    target=pair.target,
                    encoder=encoder,
                    decoder=decoder,
                    cross=cross,
                    choices=choices,
                    image=image,
                )
            )
        return found

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[dict[str, np.ndarray]]:
        """Yield a batch for every pair; where a task has no answers, noise hides some of its target."""
        if not self._inputs.task.answer:
            yield from (self._inputs.noised_arrays(pair.target) for pair in pairs)
            return
        if self._inputs.task.answer == SPAN:
            encoded = [EncodedPair(*marked_pair(self._inputs.encoder, pair)) for pair in pairs]
        else:
            encoded = self._inputs.encode_pairs([(pair.source, pair.target) for pair in pairs])
        yield from (self._inputs.pair_arrays([each], 1) for each in encoded)

    def _parts(self, batch: Mapping[str, np.ndarray], seen: Mapping[str, Any]) -> Iterator[Attention]:
        """Yield the weights of every part that attends, without padding."""
        source, read, written = self._source(batch), self._labels(batch, "target_in"), self._labels(batch, "target_out")
        labels = {
            Part.ENCODER_SELF: (source, source),
            Part.DECODER_SELF: (read, read),
            Part.CROSS: (written, source),  # a weight stands beside the token that it helped to write
        }
        for part, (weights, mask) in _arrays(seen).items():
            rows, columns = labels[part]
            shown = ..., slice(len(rows)), slice(len(columns))
            yield Attention(part=part, weights=weights[:, 0][shown], mask=mask[0][shown], rows=rows, columns=columns)

    def _source(self, batch: Mapping[str, np.ndarray]) -> Labels:
        if "image" not in batch:
            return self._labels(batch, "source")
        model = self._model.config
        class_token = ("class",) if model.family == "vit" and model.head.pooling == "first" else ()
        return class_token + tuple(model.vision.patch_names)

    def _labels(self, batch: Mapping[str, np.ndarray], name: str) -> Labels:
        """Return the tokens of one side of a batch's only row, as the vocabulary writes them."""
        side = 0 if name == "source" else 1
        segments = batch.get(f"{('source', 'target')[side]}_segments")
        if segments is None:
            return ()
        return self._written(side, batch[name][0][segments[0] > 0].tolist())

    def _written(self, side: int, ids: Sequence[int]) -> Labels:
        tokens, symbols = self._inputs.tokenizers[side].tokens, self._inputs.task.symbols
        names = [MASK] if symbols == 1 else [SENTINEL.format(i) for i in range(symbols)]
        written = (*tokens, *names)
        return tuple(written[i] if i < len(written) else f"<{i}>" for i in ids)  # a model may have rows past them

    def _choices(self, batch: Mapping[str, np.ndarray], likely: np.ndarray) -> tuple[Choice, ...]:
        """Return the choice at every position that predicts something, or of every label, or of both ends of a span.

        Classes are numbered from 0. A number was no choice among others. Without a target, what is predicted is hidden
        in the source.
        """
        answer, wanted = self._inputs.task.answer, batch["target_out"][0]
        if answer == "number":
            return ()
        if answer == SPAN:
            return self._ends(batch, likely)
        places = [(int(t), int(wanted[t])) for t in np.flatnonzero(batch["weights"][0])]
        if answer == "labels":
            places = [(0, int(label)) for label in np.flatnonzero(wanted)]
        first, choices = NUM_SYMBOLS if answer in CLASSES else 0, []
        read = self._labels(batch, "source") if not answer and "target_segments" not in batch else ()
        for t, target in places:
            best = np.argsort(-likely[t])[:LIKELIEST].tolist()
            token, *others = self._written(1, [first + i for i in (target, *best)])
            choice = _choice(token, others, likely[t], target, best)
            choices.append(choice._replace(read=read[t]) if read else choice)
        return tuple(choices)

    def _ends(self, batch: Mapping[str, np.ndarray], likely: np.ndarray) -> tuple[Choice, ...]:
        """Return where an answer starts and where it ends, likely f32 [s 2]; at the first position there is none."""
        tokens = ("no answer", *self._labels(batch, "source")[1:])
        choices = []
        for side, (name, mark) in enumerate({"start": START, "end": END}.items()):
            place = int(np.flatnonzero(batch["target_out"][0] & mark)[0])
            best = np.argsort(-likely[: len(tokens), side])[:LIKELIEST].tolist()
            others = [tokens[i] for i in best]
            choices.append(_choice(f"{name}: {tokens[place]}", others, likely[:, side], place, best))
        return tuple(choices)


def to_restore(pairs: Sequence[tuple[str | None, str | None]]) -> list[Pair]:
    """Return texts that are given as sources as what a task that hides some of them has to restore, its targets.

    Raises UserError for an empty one, and where there is a target.
    """
    for text, target in pairs:
        if target is not None or not (text or "").strip():
            raise UserError("a run of mlm or denoise restores a text: attend([('a text', None)]), and no target")
    return [Pair("", text or "") for text, _ in pairs]


def _choice(token: str, others: Sequence[str], likely: np.ndarray, target: int, best: Sequence[int]) -> Choice:
    return Choice(
        token, float(likely[target]), tuple((other, float(likely[i])) for other, i in zip(others, best, strict=True))
    )


@functools.lru_cache(KEPT)
def _make_pass(model: Model, answer: str) -> Any:
    """Return the compiled (parameters, batch) → (intermediates, probabilities [b t v]).

    Probabilities of a row add up to one, but for those of several labels, each of which is there or not, and those of a
    span [b s 2], which add up to one over the positions of either end.
    """

    def forced(params: PyTree, batch: Batch) -> tuple[Any, jax.Array]:
        hidden, seen = watched_pass(model, params, batch)
        logits = model.apply({"params": params}, hidden, method="logits")
        if answer == SPAN:
            return seen, jnp.exp(span_log_probs(logits, batch["target_out"]))
        if model.config.head.crf:
            allowed = allowed_states(batch, logits.shape[-1])
            return seen, pair_shares(logits, allowed).sum(axis=2)[..., :-1]
        likely = jax.nn.sigmoid if answer == "labels" else jax.nn.softmax
        return seen, likely(logits.astype(jnp.float32))

    return jax.jit(forced)


def _arrays(seen: Mapping[str, Any]) -> dict[Part, tuple[np.ndarray, np.ndarray]]:
    """Return the weights [l b h t s] of each part that attends, and the mask [b t s] of its layers."""
    if "cross_weights" in seen:  # of a recurrent model: one layer, one head
        (weights,) = seen["cross_weights"]
        return {Part.CROSS: (weights[None, :, None], np.ones(weights.shape, bool))}
    blocks = {part: seen.get(stack, {}).get("block", {}).get(name, {}) for part, (stack, name) in BLOCKS.items()}
    return {part: (found["weights"][0], found["mask"][0][0, :, 0]) for part, found in blocks.items() if found}
