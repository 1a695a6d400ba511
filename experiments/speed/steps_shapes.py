"""What steps.py times: sizes, batches of random tokens, and the matrix products of a step."""

import collections
from typing import NamedTuple

import numpy as np

from jformer.config.presets import PRESETS
from jformer.data.tokenizers.symbols import BOS, NUM_SYMBOLS
from jformer.models import ModelConfig

LENGTH, SHORTEST = 32, 8  # tokens of a sentence
ROW = 256  # positions of a packed row
SIDES = ("source", "target")
SIZES = {  # preset, vocabulary, pairs of LENGTH + LENGTH positions
    "tiny": ("transformer_tiny", 10_000, 128),  # Multi30k
    "base": ("transformer_base", 8_000, 64),
    "big": ("transformer_big", 32_000, 32),
    "smoke": ("transformer_tiny", 50, 8),  # shrunk
}
SHRUNK = {"num_layers": 1, "d_model": 16, "d_ff": 32, "num_heads": 2}


class Product(NamedTuple):
    """`batch` products of a matrix [m k] by a matrix [k n]."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Multiply and add are two."""
        return 2 * self.batch * self.m * self.k * self.n


def model_config(size: str, extra_dropout: bool = False) -> ModelConfig:
    """Return the model; `extra_dropout` also drops attention weights and inside the feed-forward."""
    preset, vocabulary, _ = SIZES[size]
    extra = dict.fromkeys(("attention_dropout", "activation_dropout"), 0.1 if extra_dropout else 0.0)
    fields = {**PRESETS[preset], "dropout": 0.1, **extra, **(SHRUNK if size == "smoke" else {})}
    return ModelConfig(**fields).with_vocabulary(vocabulary, vocabulary)


def make_batch(kind: str, pairs: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Return `pairs` x LENGTH positions a side: rows that are full, padded (about 60 % real) or packed."""
    rng = np.random.default_rng(0)
    rows = draw_lengths(kind, pairs, rng)
    length = ROW if kind == "packed" else LENGTH
    batch = {"row": np.arange(len(rows), dtype=np.int32)}
    for side, name in enumerate(SIDES):
        segments, positions = np.zeros((2, len(rows), length), np.int32)
        for i, lengths in enumerate(rows):
            own = [pair[side] for pair in lengths]
            segments[i, : sum(own)] = np.repeat(np.arange(len(own)) + 1, own)
            positions[i, : sum(own)] = np.concatenate([np.arange(one) for one in own])
        tokens = np.where(segments > 0, rng.integers(NUM_SYMBOLS, vocabulary, segments.shape), 0).astype(np.int32)
        batch |= {f"{name}_segments": segments, f"{name}_positions": positions, name: tokens}
    shifted = np.where(batch["target_positions"] == 0, BOS, np.roll(batch["target"], 1, axis=1))
    real = batch["target_segments"] > 0
    rest = {"target_in": np.where(real, shifted, 0), "target_out": batch.pop("target")}
    return batch | rest | {"weights": real.astype(np.float32)}


def draw_lengths(kind: str, pairs: int, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Return (source, target) lengths of the sentence pairs of every row."""

    def draw() -> tuple[int, int]:
        source, target = rng.integers(SHORTEST, LENGTH, 2)
        return int(source), int(target)

    if kind != "packed":
        return [[(LENGTH, LENGTH) if kind == "full" else draw()] for _ in range(pairs)]
    rows = []
    for _ in range(pairs * LENGTH // ROW):
        row = [draw()]
        while all(sum(lengths) <= ROW for lengths in zip(*row, strict=True)):
            row.append(draw())
        rows.append(row[:-1])
    return rows


def step_products(model: ModelConfig, rows: int, source: int, target: int) -> dict[Product, int]:
    """Return how often an encoder-decoder's step takes which product: forward, and the gradients of both factors.

    Projections that read the same are one product. `source` and `target` are the lengths of a row; heads share none.
    """
    found: collections.Counter[Product] = collections.Counter()
    d, f, h = model.d_model, model.d_ff, model.num_heads

    def product(count: int, m: int, k: int, n: int, batch: int = 1) -> None:
        for shape in ((m, k, n), (m, n, k), (k, m, n)):
            found[Product(batch, *shape)] += count

    def attention(count: int, queries: int, keys: int) -> None:
        product(count, rows * queries, d, d)  # output
        product(count, queries, d // h, keys, rows * h)  # scores
        product(count, queries, keys, d // h, rows * h)  # values

    for layers, length in ((model.num_layers, source), (model.decoder_layers, target)):
        attention(layers, length, length)
        product(layers, rows * length, d, 3 * d)
        product(layers, rows * length, d, f)
        product(layers, rows * length, f, d)
    attention(model.decoder_layers, target, source)
    product(model.decoder_layers, rows * target, d, d)
    product(model.decoder_layers, rows * source, d, 2 * d)
    product(1, rows * target, d, model.target_vocab_size)
    return dict(found)
