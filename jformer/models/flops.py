"""FLOPs of matrix products, by part: of one text, of a batch without padding, and of a batch as computed.

The cost of a forward pass is a polynomial in the lengths of a text: linear terms, and attention over all pairs of its
positions. So a few sums over the texts of a batch give its FLOPs exactly, however its rows are padded or packed.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jformer.errors import refuse_unknown
from jformer.models import ModelConfig
from jformer.models.layers.feed_forward import GATES
from jformer.models.layers.recurrent_cells import GATES as GATES_OF_CELL
from jformer.models.lora_config import is_factor

KNOWN = (  # options that the counts depend on, or that change no product
    *("family", "vocab_size", "target_vocab_size", "num_layers", "num_decoder_layers", "shared_layers", "d_model"),
    *("d_ff", "num_heads", "num_kv_heads", "d_k", "d_v", "norm", "norm_type", "norm_epsilon", "residual"),
    *("attention_scale", "positions", "max_length", "activation", "bias", "embedding_scale", "embedding_norm"),
    *("dropout", "attention_dropout", "activation_dropout", "embedding_dropout", "output_dropout"),
    *("shared_embedding", "tied_output", "init", "parametrization", "dtype", "precision"),
    *("relative", "vision", "head", "recurrent", "mup", "execution"),
    "lora",  # its products are small
    "window",  # the pairs that it hides are computed too
    *("attention", "feed_forward"),  # user-defined layers count as those that they replace
)
PLACES = {  # pattern of parameter names → place in the forward pass, and the part its products count for
    r"^(source_)?(embedding|input)/|^class_token|^distances": (0, ""),
    r"^patches/": (1, "patches"),
    r"^encoder/": (2, "encoder"),
    r"^target_(embedding|input)/": (3, ""),
    r"^decoder/.*/cross_attn/": (4, "decoder cross-attention"),
    r"^decoder/": (4, "decoder self-attention and feed-forward"),
    r"^head/transform/": (5, "transform"),
    r"^pooler/": (5, "pooler"),
    r"": (6, "logits"),
}


class Work(NamedTuple):
    """Sums over texts, from which their FLOPs follow; s and t are a text's lengths on the two sides."""

    texts: int = 0
    source: int = 0  # Σ s; of an image its pixels
    target: int = 0  # Σ t
    source_pairs: int = 0  # Σ s²
    target_pairs: int = 0  # Σ t²
    cross_pairs: int = 0  # Σ s·t

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return self.source + self.target


def work_of(source: np.ndarray, target: np.ndarray) -> Work:
    """Return the work of texts with these lengths i64 [n] on the two sides; empty texts do not count."""
    texts = np.count_nonzero(source + target)
    sums = (texts, source.sum(), target.sum(), source @ source, target @ target, source @ target)
    return Work(*(int(each) for each in sums))


def text_work(source: int, target: int) -> Work:
    """Return the work of one text, of one image, `text_work(1, 0)`, or of one with its caption, `text_work(1, 9)`."""
    return work_of(np.array([source]), np.array([target]))


def batch_work(batch: Mapping[str, np.ndarray]) -> tuple[Work, Work]:
    """Return the work of the texts of a batch, and that of its rows with all their padding."""
    rows = len(batch["weights"])
    if "image" in batch:  # one a row, and one text at most
        segments = batch.get("target_segments", np.zeros((rows, 0), np.int32))
        pixels = np.full(rows, math.prod(batch["image"].shape[1:3]))
        real = np.where(batch["weights"][:, 0] > 0, pixels, 0)
        return work_of(real, (segments > 0).sum(axis=1)), work_of(pixels, np.full(rows, segments.shape[1]))
    sides = [batch.get(f"{side}_segments", np.zeros((rows, 0), np.int32)) for side in ("source", "target")]
    most = 1 + max(int(segments.max(initial=0)) for segments in sides)
    full = [np.full(rows, segments.shape[1]) for segments in sides]
    return work_of(*(_lengths(segments, most) for segments in sides)), work_of(*full)


def total(works: Iterable[Work]) -> Work:
    """Add up."""
    return Work(*map(sum, zip(*works, strict=True)))


def forward_flops(model: ModelConfig, work: Work) -> dict[str, int]:
    """Return the FLOPs of the matrix products of a forward pass, by part; multiply and add are two.

    A family reads its own side of the work, and models of images the number of images. Attention is counted over all
    pairs of positions of a text, as computed, not only those that a mask leaves.

    Raises UserError for an option that the count does not support.
    """
    refuse_unknown("model", model, KNOWN, "the count of FLOPs (models/flops.py)")
    if model.recurrent.cell:
        return _recurrent(model, work)
    if model.family == "encdec":
        if model.head.vectors:
            return {"encoder": model.num_layers * _block(model, work.source, work.source_pairs)}
        layers, patches = model.decoder_layers, {}
        if model.vision.source:
            patches = _patches(model, work.texts)
            p = model.num_patches  # what the encoder reads from each image, and the decoder attends to
            work = work._replace(source=work.texts * p, source_pairs=work.texts * p**2, cross_pairs=work.target * p)
        return {
            **patches,
            "encoder": model.num_layers * _block(model, work.source, work.source_pairs),
            "decoder self-attention and feed-forward": layers * _block(model, work.target, work.target_pairs),
            "decoder cross-attention": layers * _attention(model, work.target, work.source, work.cross_pairs),
            **_token_head(model, work.target, model.target_vocab_size),
        }
    if model.family == "decoder":
        stack = {"decoder": model.num_layers * _block(model, work.target, work.target_pairs)}
        return stack if model.head.vectors else stack | _token_head(model, work.target, model.vocab_size)
    if model.family == "vit":
        length = model.num_patches + (model.head.pooling == "first")
        stack = {"encoder": model.num_layers * _block(model, work.texts * length, work.texts * length**2)}
        return _patches(model, work.texts) | stack | _class_head(model, work.texts)
    stack = {"encoder": model.num_layers * _block(model, work.source, work.source_pairs)}
    read = work.texts if model.pooled else work.source
    return stack | (_class_head(model, read) if model.pooled or model.head.num_classes else
                    _token_head(model, read, model.vocab_size))  # fmt: skip


class Frozen(NamedTuple):
    """The gradients of one part that are not computed."""

    kernels: float  # the share of the numbers of its kernels that are not trained
    inputs: bool  # nothing before it is trained either, so its inputs need no gradient


def frozen_parts(model: ModelConfig, sizes: Mapping[str, int], frozen: Collection[str]) -> dict[str, Frozen]:
    """Return the parts of `forward_flops` with frozen kernels; "" is the whole of a recurrent model.

    Args:
        model: of the parameters.
        sizes: of all parameters, by name.
        frozen: the names of those without a gradient.
    """
    if not frozen:
        return {}
    first, all_of, fixed = math.inf, Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    for name, size in sizes.items():
        place, part = next(found for pattern, found in PLACES.items() if re.search(pattern, name))
        if name not in frozen:
            first = min(first, place)
        if part and name.endswith("kernel") and not is_factor(name):
            all_of[place, part] += size
            fixed[place, part] += size * (name in frozen)
    if model.recurrent.cell:
        return {"": Frozen(fixed.total() / all_of.total(), False)}
    table = "target_embedding/embedding" if "target_embedding/embedding" in sizes else "source_embedding/embedding"
    if (6, "logits") not in all_of:  # tied
        all_of[6, "logits"], fixed[6, "logits"] = 1, int({table, "embedding/embedding"} & {*frozen} != set())
    stacks = ("encoder", "decoder")
    return {
        "decoder" if model.family == "decoder" and place == 4 else part: Frozen(
            fixed[place, part] / count, first > place or (first == place and not part.startswith(stacks))
        )
        for (place, part), count in all_of.items()
    }


def update_flops(model: ModelConfig, work: Work, frozen: Mapping[str, Frozen] | None = None) -> int:
    """Return the FLOPs of a forward and a backward pass; `frozen` is from `frozen_parts`; None = all is trained.

    A product has two gradients of the same cost; that of patches has only one, since images need none. Recomputation by
    remat is not counted.
    """
    frozen = frozen or {}
    forward = forward_flops(model, work)
    if "" in frozen:
        forward = {"": sum(forward.values())}
    alone = work._replace(source_pairs=0, target_pairs=0, cross_pairs=0)
    kernels = forward_flops(model, alone) if frozen else {}  # products with kernels, excluding those of attention
    kernels = {"": sum(kernels.values())} if "" in frozen else kernels
    total = 3 * sum(forward.values()) - forward.get("patches", 0)
    for part in frozen.keys() & forward.keys():
        total -= round(frozen[part].kernels * kernels[part])
        total -= (2 * forward[part] - kernels[part]) * (frozen[part].inputs and part != "patches")
    return total


def _lengths(segments: np.ndarray, most: int) -> np.ndarray:
    """Count the tokens of every text of every row: those of one segment, 1 to `most` - 1."""
    rows = len(segments)
    numbers = segments + most * np.arange(rows)[:, None]
    return np.bincount(numbers.ravel(), minlength=rows * most).reshape(rows, most)[:, 1:].ravel()


def _patches(model: ModelConfig, images: int) -> dict[str, int]:
    """Count the projection of the patches of images."""
    pixels = model.vision.patch_size**2 * model.vision.channels
    return {"patches": 2 * images * model.num_patches * pixels * model.d_model}


def _block(model: ModelConfig, tokens: int, pairs: int) -> int:
    """Count self-attention and feed-forward of one layer."""
    matrices = 3 if model.activation in GATES else 2
    # Twice as many distances as positions; their projection, once a batch, is not counted.
    distances = 2 * 2 * pairs * model.num_heads * model.key_size if model.positions == "transformer_xl" else 0
    feed_forward = 2 * tokens * matrices * model.d_model * model.d_ff
    return _attention(model, tokens, tokens, pairs) + distances + feed_forward


def _attention(model: ModelConfig, queries: int, keys: int, pairs: int) -> int:
    """Count one layer: the projections of queries and outputs, of keys and values, and the products of the pairs."""
    h, g, d = model.num_heads, model.kv_heads, model.d_model
    return 2 * (model.key_size + model.value_size) * (queries * d * h + keys * d * g + pairs * h)


def _recurrent(model: ModelConfig, work: Work) -> dict[str, int]:
    """Count recurrent stacks, the attention and readout of every step of a decoder, and the head."""
    r, d, gates = model.recurrent, model.d_model, GATES_OF_CELL[model.recurrent.cell] * model.d_model
    side = d * (2 if r.bidirectional else 1)  # features of the encoder's output

    def stack(tokens: int, layers: int, directions: int) -> int:
        inputs = model.embedding_size + (layers - 1) * directions * d
        return 2 * tokens * directions * gates * (inputs + layers * d)

    if model.family == "decoder":
        return {"decoder": stack(work.target, model.num_layers, 1), **_logits(work.target, d, model.vocab_size)}
    encoder = {"encoder": stack(work.source, model.num_layers, 1 + r.bidirectional)}
    if model.family == "encoder":
        read = work.texts if model.pooled else work.source
        if model.pooled and model.head.pooler:
            return encoder | {"pooler": 2 * read * side * d} | _logits(read, d, model.head.num_classes)
        return encoder | _logits(read, side, model.head.num_classes or model.vocab_size)
    parts = {**encoder, "decoder": stack(work.target, model.decoder_layers, 1)}
    if r.bridge == "dense":
        parts["bridge"] = 2 * work.texts * model.decoder_layers * d * d
    if r.attention == "none":
        return parts | _logits(work.target, d, model.target_vocab_size)
    attention = 2 * work.cross_pairs * (d + side)  # a score and a weighed vector for every pair
    if r.attention != "dot":
        attention += 2 * work.source * side * d  # the keys
    if r.attention in ("additive", "concat"):
        attention += 2 * work.target * d * d  # the queries
    out = model.readout_size * (2 if r.attention == "additive" else 1)
    fed = side if r.attention == "additive" else model.readout_size if r.input_feeding else 0
    read = d + side + (model.embedding_size if r.attention == "additive" else 0)
    parts |= {"attention": attention, "readout": 2 * work.target * (gates * fed + out * read)}
    return parts | _logits(work.target, model.readout_size, model.target_vocab_size)


def _logits(count: int, features: int, rows: int) -> dict[str, int]:
    return {"logits": 2 * count * features * rows}


def _token_head(model: ModelConfig, tokens: int, rows: int) -> dict[str, int]:
    transform = {"transform": 2 * tokens * model.d_model**2} if model.head.transform else {}
    return transform | {"logits": 2 * tokens * model.d_model * rows}


def _class_head(model: ModelConfig, vectors: int) -> dict[str, int]:
    pooler = {"pooler": 2 * vectors * model.d_model**2} if model.head.pooler else {}
    logits = {"logits": 2 * vectors * model.d_model * model.head.num_classes} if model.head.num_classes else {}
    return pooler | logits
