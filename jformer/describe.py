"""What a config costs before anything is spent: parameters by part, FLOPs by part, and which attention runs.

All of it follows from shapes: no data is read and no weight allocated, whatever the size of the model.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jformer.config import Config
from jformer.data.tokenizers import NUM_SYMBOLS
from jformer.data.vocabularies import load_tokenizers
from jformer.models import ModelConfig, build_model, init_params
from jformer.models.attention import choose_kernel
from jformer.models.transformer import GATES
from jformer.restore import build_task
from jformer.tasks import Task, sized

ASSUMED_CLASSES = 2
LENGTHS = (32, 128)  # of texts; the longest that the config allows is the last column
UNITS = {
    "encdec": "target token, source and target having",
    "encoder": "token of a text that has",
    "decoder": "token of a text that has",
    "vit": "image",
}


def describe(config: Config, workdir: Path | None = None) -> str:
    """Return what the model is, its parameters with their shares, and the FLOPs of its matrix products.

    Vocabulary and classes are those of the run in `workdir`; before there is one, what the config leads to expect.
    """
    task, saved = build_task(config), bool(workdir and (workdir / "tokenizer").is_dir())
    counts = _tokenizer_sizes(workdir) if workdir and saved else _assumed_sizes(config, task)
    model = sized(config.model, task, *counts)
    rows = parameter_rows(jax.eval_shape(functools.partial(init_params, build_model(model)), jax.random.key(0)))
    total = sum(count for _, _, count in rows)
    cells = [["part", "shapes", "parameters", "share"]]
    cells += [[name, shape, f"{count:,}", f"{count / total:.1%}"] for name, shape, count in rows]
    cells += [["total", "", f"{total:,}", f"{1:.1%}"]]
    lines = [summary(config), *_size_lines(config, model, task, saved), kernel_line(model, jax.default_backend())]
    return "\n".join([*lines, "", *_aligned(cells, 2), "", *_aligned(flops_table(config, model), 1)])


def summary(config: Config) -> str:
    """Return the family, its layers and the task in one line."""
    model = config.model
    decoder = f" + {model.decoder_layers}" if model.family == "encdec" else ""
    return f"model: {model.family} of {model.num_layers}{decoder} layers, for task {config.task}"


def kernel_line(model: ModelConfig, platform: str) -> str:
    """Return which code attends on a platform, and why."""
    kernel = choose_kernel(model, platform)
    if kernel == "jax":
        why = f"jax.nn.dot_product_attention, on {platform}"
    elif model.attention_dropout:
        why = f"on {platform}: model.attention_dropout={model.attention_dropout} drops weights"
    elif model.key_size != model.value_size:
        why = f"on {platform}: keys of {model.key_size} and values of {model.value_size}"
    else:
        why = f"on {platform}, where the other is no quicker"
    return f"attention kernel: {kernel} ({why})"


def parameter_rows(params: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return (part, shapes, count) of every table, norm, projection and sublayer; stacks begin with their layers."""
    rows = []
    for name, part in _parts(params):
        leaves = jax.tree.leaves(part)
        largest = max(leaves, key=lambda leaf: leaf.size)
        shape = " x ".join(map(str, largest.shape)) + (" ..." if len(leaves) > 1 else "")
        rows.append((name, shape, sum(leaf.size for leaf in leaves)))
    return rows


def forward_flops(model: ModelConfig, source: int, target: int) -> dict[str, int]:
    """Return the FLOPs of the matrix products of one example's forward pass, by part; multiply and add are two.

    `source` and `target` are lengths in tokens; a family reads its own side, and vision models neither. Attention is
    counted over all pairs of positions, as it is computed, not only over those that a mask leaves.
    """
    if model.family == "encdec":
        layers = model.decoder_layers
        return {
            "encoder": model.num_layers * _block_flops(model, source),
            "decoder self-attention and feed-forward": layers * _block_flops(model, target),
            "decoder cross-attention": layers * _attention_flops(model, target, source),
            **_token_head_flops(model, target, model.target_vocab_size),
        }
    if model.family == "decoder":
        stack = {"decoder": model.num_layers * _block_flops(model, target)}
        return stack | _token_head_flops(model, target, model.vocab_size)
    if model.family == "vit":
        pixels = model.vision.patch_size**2 * model.vision.channels
        length = model.num_patches + (model.head.pooling == "first")
        patches = {"patches": 2 * model.num_patches * pixels * model.d_model}
        return patches | {"encoder": model.num_layers * _block_flops(model, length)} | _class_head_flops(model)
    stack = {"encoder": model.num_layers * _block_flops(model, source)}
    classifies = model.head.num_classes
    return stack | (_class_head_flops(model) if classifies else _token_head_flops(model, source, model.vocab_size))


def flops_table(config: Config, model: ModelConfig) -> list[list[str]]:
    """Return the cells of the table of FLOPs, a column for each length of text.

    What predicts tokens is counted for one of them, what predicts a class for the whole text or image.
    """
    limits = {"encoder": config.data.max_source_length, "decoder": config.data.max_target_length}
    longest = limits.get(model.family, max(limits.values()))
    lengths = [1] if model.family == "vit" else [*(length for length in LENGTHS if length < longest), longest]
    columns = []
    for length in lengths:
        tokens = 1 if model.head.num_classes else length
        column = {part: flops / tokens for part, flops in forward_flops(model, length, length).items()}
        columns.append(column | {"total; an update takes about three times that": sum(column.values())})
    unit = "text that has" if model.family == "encoder" and model.head.num_classes else UNITS[model.family]
    heads = ["FLOPs"] if model.family == "vit" else [f"{length:,} tokens" for length in lengths]
    parts = [[f"  {part}", *(f"{column[part]:,.0f}" for column in columns)] for part in columns[0]]
    return [[f"forward FLOPs of one {unit}", *heads], *parts]


def _tokenizer_sizes(workdir: Path) -> tuple[int, int]:
    source, target = load_tokenizers(workdir / "tokenizer")
    return source.vocab_size, target.vocab_size


def _assumed_sizes(config: Config, task: Task) -> tuple[int, int]:
    size, classes = config.data.vocab_size, config.model.head.num_classes or ASSUMED_CLASSES
    return size, NUM_SYMBOLS + classes if task.answer == "label" else size


def _size_lines(config: Config, model: ModelConfig, task: Task, saved: bool) -> Iterator[str]:
    """Say how many rows and classes there are, and who says so."""
    if model.family != "vit":
        origin = "of the run's tokenizer" if saved else "assumed from data.vocab_size"
        origin = "set by model.vocab_size" if config.model.vocab_size else origin
        noise = f"; {task.symbols} for what the noise puts in" if task.symbols else ""
        target = f" source and {model.target_vocab_size:,} target" if model.family == "encdec" else ""
        yield f"vocabulary: {model.vocab_size:,}{target} rows ({origin}{noise})"
    if model.head.num_classes:
        origin = "of the run's labels" if saved else "assumed; model.head.num_classes sets another number"
        origin = "set by model.head.num_classes" if config.model.head.num_classes else origin
        yield f"classes: {model.head.num_classes:,} ({origin})"


def _parts(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name, parameters) of what has no parts of its own; a block's sublayers count as such."""
    inner = isinstance(tree, Mapping) and any(isinstance(part, Mapping) for part in tree.values())
    if inner and "block" not in path[:-1]:
        for name, part in tree.items():
            yield from _parts(part, (*path, name))
    else:
        yield "/".join(path), tree


def _block_flops(model: ModelConfig, length: int) -> int:
    """Count self-attention and feed-forward of one layer."""
    matrices = 3 if model.activation in GATES else 2
    return _attention_flops(model, length, length) + 2 * length * matrices * model.d_model * model.d_ff


def _attention_flops(model: ModelConfig, queries: int, keys: int) -> int:
    """Count one layer: the projections of queries and outputs, of keys and values, and the products of all pairs."""
    h, g, d = model.num_heads, model.kv_heads, model.d_model
    return 2 * (model.key_size + model.value_size) * (queries * d * h + keys * d * g + queries * keys * h)


def _token_head_flops(model: ModelConfig, length: int, rows: int) -> dict[str, int]:
    transform = {"transform": 2 * length * model.d_model**2} if model.head.transform else {}
    return transform | {"logits": 2 * length * model.d_model * rows}


def _class_head_flops(model: ModelConfig) -> dict[str, int]:
    pooler = {"pooler": 2 * model.d_model**2} if model.head.pooler else {}
    return pooler | {"logits": 2 * model.d_model * model.head.num_classes}


def _aligned(cells: list[list[str]], left: int) -> list[str]:
    """Set a table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
