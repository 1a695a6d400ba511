"""From the parameters of Hugging Face Transformers to ours: a table of names for each model, and what fills our tree.

A row says our module, then theirs; `{}` is the number of a layer, which ours stacks. A row of a single parameter
names both sides to the leaf. A row may bring the function that reads it; without one, a kernel of torch's Linear
[out in] becomes ours [in out]. A state is their names → NumPy arrays: there is no torch in this file.
"""

from collections import Counter

import jax
import numpy as np

from jformer.hf.marian import LEAVES
from jformer.hf.marian import NAMES as MARIAN


def below(ours, theirs, rows):
    """Put the rows of a table below a module of either side."""
    named = {f"{ours}/{name}": row if isinstance(row, tuple) else (row,) for name, row in rows.items()}
    return {name: (f"{theirs}.{row[0]}", *row[1:]) for name, row in named.items()}


def as_it_is(array):
    return array


def third(i):
    """Read one of queries, keys and values, which GPT-2 has side by side."""
    return lambda array: np.split(array, 3, axis=-1)[i]


def patch_kernel(kernel):
    """Read a convolution [d c h w] as the projection of patches [h*w*c d]."""
    return kernel.transpose(2, 3, 1, 0).reshape(-1, len(kernel))


_BERT = {
    "embedding": "bert.embeddings.word_embeddings",
    "input/positions": "bert.embeddings.position_embeddings",
    "input/segments": "bert.embeddings.token_type_embeddings",
    "input/norm": "bert.embeddings.LayerNorm",
    **below("encoder/block", "bert.encoder.layer.{}", {
        "self_attn/q": "attention.self.query",
        "self_attn/k": "attention.self.key",
        "self_attn/v": "attention.self.value",
        "self_attn/o": "attention.output.dense",
        "self_attn_norm": "attention.output.LayerNorm",
        "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }),
}  # fmt: skip
BERT_TOKENS = {
    **_BERT,
    "head/transform": "cls.predictions.transform.dense",
    "head/norm": "cls.predictions.transform.LayerNorm",
    "head/bias": "cls.predictions.bias",
}
BERT_CLASSES = {**_BERT, "pooler/dense": "bert.pooler.dense", "classifier": "classifier"}

GPT2 = {
    "embedding": "transformer.wte",
    "input/positions": "transformer.wpe",
    "decoder/final_norm": "transformer.ln_f",
    # Its Conv1D is a Linear with a kernel [in out].
    **below("decoder/block", "transformer.h.{}", {
        "self_attn/q": ("attn.c_attn", third(0)),
        "self_attn/k": ("attn.c_attn", third(1)),
        "self_attn/v": ("attn.c_attn", third(2)),
        "self_attn/o": ("attn.c_proj", as_it_is),
        "self_attn_norm": "ln_1",
        "feed_forward/up": ("mlp.c_fc", as_it_is),
        "feed_forward/down": ("mlp.c_proj", as_it_is),
        "feed_forward_norm": "ln_2",
    }),
}  # fmt: skip

LLAMA = {
    "embedding": "model.embed_tokens",
    "head/output": "lm_head",
    "decoder/final_norm": "model.norm",
    **below("decoder/block", "model.layers.{}", {
        "self_attn/q": "self_attn.q_proj",
        "self_attn/k": "self_attn.k_proj",
        "self_attn/v": "self_attn.v_proj",
        "self_attn/o": "self_attn.o_proj",
        "self_attn_norm": "input_layernorm",
        "feed_forward/gate": "mlp.gate_proj",
        "feed_forward/up": "mlp.up_proj",
        "feed_forward/down": "mlp.down_proj",
        "feed_forward_norm": "post_attention_layernorm",
    }),
}  # fmt: skip


def _t5_stack(side, feed_forward, last):
    """Name a stack whose feed-forward is sublayer `last` of its layers."""
    attentions = {"self_attn": "layer.0.SelfAttention", "cross_attn": "layer.1.EncDecAttention"}
    rows = {}
    for i, (ours, theirs) in enumerate(list(attentions.items())[:last]):
        rows |= {f"{ours}/{name}": f"{theirs}.{name}" for name in "qkvo"} | {f"{ours}_norm": f"layer.{i}.layer_norm"}
    rows |= {f"feed_forward/{a}": f"layer.{last}.DenseReluDense.{b}" for a, b in feed_forward.items()}
    rows["feed_forward_norm"] = f"layer.{last}.layer_norm"
    return {
        **below(f"{side}/block", f"{side}.block.{{}}", rows),
        f"{side}/position_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias",
        f"{side}/final_norm": f"{side}.final_layer_norm",
    }


def _t5(feed_forward):
    """Name both stacks and the table."""
    stacks = _t5_stack("encoder", feed_forward, 1) | _t5_stack("decoder", feed_forward, 2)
    return {"source_embedding": "shared", **stacks}


T5 = _t5({"up": "wi", "down": "wo"})
T5_1_1 = {**_t5({"gate": "wi_0", "up": "wi_1", "down": "wo"}), "head/output": "lm_head"}


BART = {
    **MARIAN,
    "source_input/norm": "model.encoder.layernorm_embedding",
    "target_input/norm": "model.decoder.layernorm_embedding",
    # Position p is in row p + 2.
    "source_input/positions": ("model.encoder.embed_positions", lambda table: table[2:]),
    "target_input/positions": ("model.decoder.embed_positions", lambda table: table[2:]),
}

VIT = {
    "class_token": "vit.embeddings.cls_token",
    "input/positions/embedding": ("vit.embeddings.position_embeddings", lambda table: table[0]),
    "patches/kernel": ("vit.embeddings.patch_embeddings.projection.weight", patch_kernel),
    "patches/bias": "vit.embeddings.patch_embeddings.projection.bias",
    "encoder/final_norm": "vit.layernorm",
    "classifier": "classifier",
    **below("encoder/block", "vit.layers.{}", {
        "self_attn/q": "attention.q_proj",
        "self_attn/k": "attention.k_proj",
        "self_attn/v": "attention.v_proj",
        "self_attn/o": "attention.o_proj",
        "self_attn_norm": "layernorm_before",
        "feed_forward/up": "mlp.fc1",
        "feed_forward/down": "mlp.fc2",
        "feed_forward_norm": "layernorm_after",
    }),
}  # fmt: skip


def find(table, path):
    """Return (row, their name, how to read it) of one of our parameters; KeyError where there is no row."""
    module, _, leaf = path.rpartition("/")
    row = path if path in table else module
    name, *reads = table[row] if isinstance(table[row], tuple) else (table[row],)
    read = reads[0] if reads else np.transpose if leaf == "kernel" else as_it_is
    return row, name if row == path else f"{name}.{LEAVES[leaf]}", read


def fill(shapes, state, table, unused):
    """Return our parameters, a tree of the given shapes, from their state.

    Every parameter of ours is filled, every number of theirs read once but for those that `unused` (name → reason)
    tells of, every row is of use: or AssertionError lists all that is not so.
    """
    failures, rows, count = [], set(), Counter()

    def read_one(path, shape):
        path = "/".join(key.key for key in path)
        try:
            row, name, read = find(table, path)
            names = [name.format(i) for i in range(shape.shape[0])] if "{}" in name else [name]
            parts = [read(state[each]) for each in names]
        except KeyError as missing:
            failures.append(f"{path}: there is no {missing}")
            return None
        rows.add(row)
        count.update({each: part.size for each, part in zip(names, parts, strict=True)})
        found = np.stack(parts) if "{}" in name else parts[0]
        if found.shape != shape.shape:
            failures.append(f"{path}: {shape.shape}, but {name} gives {found.shape}")
        return found

    params = jax.tree.map_with_path(read_one, shapes)
    failures += [f"row {row!r} is about nothing of ours" for row in table.keys() - rows]
    for name, array in state.items():
        if (count[name] == array.size) == (name in unused):
            reason = f"; unused: {unused[name]}" if name in unused else ""
            failures.append(f"{name}: {count[name]} of {array.size} numbers were read{reason}")
    assert not failures, "\n".join(["the two models do not fit:", *sorted(failures)])
    return params
