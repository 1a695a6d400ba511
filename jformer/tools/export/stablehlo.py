"""Encoder and search as one StableHLO program, which jax.export reads back and runs without jformer.

Batch and source length are symbolic: each shape is compiled when it first occurs. Parameters are in a separate file.
Later releases of JAX read such a program for six months, earlier ones for a few weeks: do not archive it.

Letters in shapes: b sentences, s source tokens, n outputs of a sentence, t their tokens, v entries of the vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Int, PyTree

from jformer.config.options import Config
from jformer.data.tokenizers.symbols import Symbols
from jformer.errors import UserError
from jformer.inference.generation import SearchBatch, begin_search, make_setup
from jformer.models import build_model
from jformer.models.layers.positions import sinusoids
from jformer.models.model import Model

PLATFORMS = ("cpu", "cuda", "tpu")


def build_program(
    config: Config,
    model: Model,
    params: Mapping[str, PyTree],
    longest: int,
    vocabulary: Bool[np.ndarray, " v"],
    symbols: Symbols,
) -> Callable[[str], None]:
    """Return a function that writes the program and its parameters into a directory.

    The program maps (parameters by name, tokens i32 [b s] with EOS, lengths i32 [b]) to (tokens i32 [b n t], scores
    f32 [b n], lengths i32 [b n]), best first; t is s + decode.max_extra_length. A row of length 0 is left empty.

    Args:
        config: how to search, and the longest source.
        model, params: the parameters become arguments of the program.
        longest: positions of the table that replaces sinusoids: the longest source or output.
        vocabulary: whether each id may be written.
        symbols: those of the target; the program itself begins outputs with them.

    Raises:
        UserError: for a search that draws random numbers.
    """
    options = config.decode
    if options.search != "beam":
        raise UserError(f"decode.search={options.search!r} cannot be exported to StableHLO: set decode.search='beam'")
    prompt = np.array([symbols.bos, *symbols.before], np.int32)
    before = len(symbols.before)  # these take positions, too
    execution = dataclasses.replace(model.config.execution, attention_kernel="own")  # others need known lengths
    model = build_model(dataclasses.replace(model.config, execution=execution))
    model, params = _with_table(model, params, longest + before)
    named = flatten_dict(params, sep="/")
    placed = model.config.max_length - before if model.config.positions == "learned" else longest
    most = min(options.max_length or longest, placed)

    def run(named: Mapping[str, Array], tokens: Int[Array, "b s"], lengths: Int[Array, " b"]) -> tuple[Array, ...]:
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
        batch: SearchBatch = {
            "source": tokens,
            "source_segments": (positions < lengths[:, None]).astype(jnp.int32),
            "source_positions": positions,
            "prompt": jnp.broadcast_to(prompt, (rows, len(prompt))),
            "prompt_length": jnp.full((rows,), len(prompt), jnp.int32),
            "limit": jnp.where(lengths > 0, jnp.minimum(lengths + options.max_extra_length, most), 0),
        }
        room = length + options.max_extra_length
        setup = make_setup((model,), options, vocabulary, symbols)
        decoded = begin_search(setup, (unflatten_dict(named, sep="/"),), batch, room).run()
        return decoded.tokens, decoded.scores, decoded.lengths

    rows, length = jax.export.symbolic_shape("b, s", constraints=(f"s <= {config.data.max_source_length}",))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, length), (rows,))]
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    program = jax.export.export(jax.jit(run), platforms=PLATFORMS)(shapes, *arrays).serialize()

    def save(directory: str) -> None:
        (Path(directory) / "program.bin").write_bytes(program)
        np.savez(Path(directory) / "params.npz", **cast(dict[str, Any], named))

    return save


def _with_table(model: Model, params: Mapping[str, PyTree], longest: int) -> tuple[Any, Mapping[str, Any]]:
    """Return a model whose sinusoids, if it has any, are a table among the parameters: lengths are symbolic.

    Learned positions are such a table, added to the embeddings in the same way.
    """
    if model.config.positions != "sinusoidal" or model.config.recurrent.cell:
        return model, params
    table = {"positions": {"embedding": sinusoids(longest, model.config.d_model)}}
    inputs = {name: {**params.get(name, {}), **table} for name in ("source_input", "target_input")}
    config = dataclasses.replace(model.config, positions="learned", max_length=longest)
    return build_model(config), {**params, **inputs}
