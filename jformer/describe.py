"""What a config costs before anything is spent: parameters by part, FLOPs per token."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jformer.config import Config
from jformer.data.vocabularies import load_tokenizers
from jformer.models import ModelConfig, build_model, init_params


def describe(config: Config, workdir: Path | None = None) -> str:
    """Return a table of parameters with their shares, and the FLOPs of one target token; no weight is allocated."""
    model, origin = sized(config, workdir)
    rows = parameter_rows(jax.eval_shape(functools.partial(init_params, build_model(model)), jax.random.key(0)))
    total = sum(count for _, _, count in rows)
    lines = [f"{'part':<32}{'shapes':<34}{'parameters':>14}{'share':>8}"]
    lines += [f"{name:<32}{shape:<34}{count:>14,}{count / total:>8.1%}" for name, shape, count in rows]
    lines += [f"{'total':<66}{total:>14,}{1:>8.1%}", ""]
    lines += [f"vocabulary: {model.vocab_size:,} source and {model.target_vocab_size:,} target rows ({origin})", ""]
    lengths = (32, 128)
    lines += [
        f"forward FLOPs per target token, source as long as target: {'':<8}" + "".join(f"{n:>12}" for n in lengths)
    ]
    table = [flops_per_token(model, n, n) for n in lengths]
    for part in table[0]:
        lines.append(f"  {part:<64}" + "".join(f"{column[part]:>12,.0f}" for column in table))
    lines.append(
        f"  {'total; a training update takes three times as many':<64}" + _row([sum(c.values()) for c in table])
    )
    return "\n".join(lines)


def sized(config: Config, workdir: Path | None) -> tuple[ModelConfig, str]:
    """Return the model config with vocabulary sizes: the run's own, else what the config asks its tokenizer for."""
    if workdir and (workdir / "tokenizer").is_dir():
        sizes = [tokenizer.vocab_size for tokenizer in load_tokenizers(workdir / "tokenizer", config.data.vocab_shared)]
        return config.model.with_vocabulary(*sizes), "of the run's tokenizer"
    size = config.data.vocab_size
    return config.model.with_vocabulary(size, size), "assumed from data.vocab_size"


def parameter_rows(params: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Return (part, shapes, count) for every table and every sublayer, stacks named with their layers."""
    rows = []
    for name, part in params.items():
        block = part.get("block", {})
        groups = {f"{name}/block/{sublayer}": tree for sublayer, tree in block.items()}
        groups |= {name if leaf == "embedding" else f"{name}/{leaf}": t for leaf, t in part.items() if leaf != "block"}
        for group, tree in groups.items():
            leaves = jax.tree.leaves(tree)
            largest = max(leaves, key=lambda leaf: leaf.size)
            shape = " x ".join(map(str, largest.shape)) + (" ..." if len(leaves) > 1 else "")
            rows.append((group, shape, sum(leaf.size for leaf in leaves)))
    return rows


def flops_per_token(model: ModelConfig, source: int, target: int) -> dict[str, float]:
    """Return the forward FLOPs of matrix products by part, per target token, a multiply and an add being two.

    `source` and `target` are sentence lengths in tokens. Attention is counted over all pairs of positions, as it is
    computed, not only over those the causal mask leaves.
    """
    d, f, h = model.d_model, model.d_ff, model.num_heads
    query, both = h * model.key_size, h * (model.key_size + model.value_size)
    output = h * model.value_size
    feed_forward = 2 * 2 * d * f
    per_source = 2 * d * (query + both + output) + 2 * both * source + feed_forward
    self_attn = 2 * d * (query + both + output) + 2 * both * target
    cross_attn = 2 * d * (query + output) + 2 * both * source + 2 * d * both * source / target
    return {
        "encoder": model.num_layers * per_source * source / target,
        "decoder self-attention and feed-forward": model.decoder_layers * (self_attn + feed_forward),
        "decoder cross-attention": model.decoder_layers * cross_attn,
        "logits": 2 * d * model.target_vocab_size,
    }


def _row(values: list[float]) -> str:
    return "".join(f"{value:>12,.0f}" for value in values)
