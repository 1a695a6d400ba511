"""What does a decoded token cost? Searches compiled for absent chips, against reading what they need once.

Nothing is run. A step is what runs once a token; its ideal reads the weights that it multiplies by and all entries of
the cache once, in bfloat16. A greedy search decodes one sentence as two rows. The peer, --sides=plain, is a greedy
search in plain JAX, without scores, rules and limits.

Command:  pip install -e ".[tpu-aot]" or ".[gpu-aot]"; python -m experiments.faults.decoding_programs
          [--models=base,gpt2_1k] [--topology=h100] [--sides=ours,plain] [--rows=2,32,256] [--beams=1,4] [--kernels=5]
          [--smoke]      (10 to 60 seconds each)
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import SingleDeviceSharding

from experiments.faults.programs import MODELS, SIDES, TOPOLOGIES, UPDATES, Update, print_kernels, resolved
from experiments.measure import smoke_sizes
from jformer.data.plan import Shape
from jformer.data.tokenizers import Symbols
from jformer.models import ModelConfig, build_model, param_shapes
from jformer.parallel.mesh import make_mesh
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer, figures
from jformer.tools.forecast.cost_analysis import Kernel, largest_kernels
from jformer.tools.forecast.topology import GIB, Topology, compiler_options, open_topology

ROWS = flags.DEFINE_list("rows", ["2", "32", "256"], "Sentences of a batch.")
BEAMS = flags.DEFINE_list("beams", ["1", "4"], "Beam sizes; 1 = greedy.")
LENGTH, ROOM = 128, 128  # tokens of a source or prompt, and of an output
HEADS = ("of", "rows", "beam", "kernels", "MB a step", "weights", "cache", "of ideal", "temps", "tokens/s")


def search(update: Update, rows: int, beam: int, chips: Topology) -> Figures:
    """Return the figures of our search."""
    options = {**update.options, "decode.beam_size": beam, "decode.dtype": "bfloat16"}
    config, task, model = resolved(update._replace(options=options))
    return compile_answer(config, task, model, Shape(rows, LENGTH, ROOM), make_mesh(-1, 1, 1, chips.devices))


def plain_search(c: ModelConfig, rows: int, chips: Topology) -> Figures:
    """Return the figures of a greedy search in plain JAX, from a cache of a prompt, or of the keys of a source.

    What does not change the cost of a step is left out: biases, scales of norms, rounding of positions.
    """
    reads, (d, h, k), special = c.family == "encdec", (c.d_model, c.num_heads, c.key_size), Symbols()
    entries = ROOM if reads else LENGTH + ROOM

    def norm(x: Any) -> Any:
        return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)

    def attend(x: Any, w: Any, keys: Any, values: Any, mask: Any = None) -> Any:
        query = jnp.einsum("bd,dhk->bhk", norm(x), w["q"])[:, None]
        return jnp.einsum("bhk,hkd->bd", jax.nn.dot_product_attention(query, keys, values, mask=mask)[:, 0], w["o"])

    def body(state: Any, weights: Any, memory: Any) -> Any:
        step, tokens, output, done, cache = state
        place, grown = entries - ROOM + step, []
        visible = (jnp.arange(entries) <= place)[None, None, None]
        x = weights["table"][tokens] + weights["places"][place]
        for w, kept, read in zip(weights["layers"], cache, memory, strict=True):
            new = (jnp.einsum("bd,dhk->bhk", norm(x), w[name])[:, None] for name in "kv")
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(*both, place, 1) for both in zip(kept, new, strict=True)
            )
            x += attend(x, w, keys, values, visible)
            grown.append([keys, values])
            x += attend(x, w["cross"], *read) if reads else 0
            x += jax.nn.relu(norm(x) @ w["up"]) @ w["down"]
        best = jnp.argmax(norm(x) @ weights["table"].T, axis=-1)
        tokens = jnp.where(done, special.pad, best)
        return step + 1, tokens, output.at[:, step].set(tokens), done | (tokens == special.eos), grown

    def run(weights: Any, cache: Any, memory: Any, first: Any) -> Any:
        state = 0, first, jnp.zeros((rows, ROOM), jnp.int32), jnp.zeros(rows, bool), cache
        return jax.lax.while_loop(
            lambda state: (state[0] < ROOM) & ~state[3].all(), lambda state: body(state, weights, memory), state
        )[2]

    def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=SingleDeviceSharding(chips.devices[0]))

    layers = c.num_decoder_layers or c.num_layers
    cross = {"q": array(d, h, k), "o": array(h, k, d)}
    layer = {**cross, "k": array(d, h, k), "v": array(d, h, k), "up": array(d, c.d_ff), "down": array(c.d_ff, d)}
    weights = {"layers": [{**layer, "cross": cross}] * layers, "places": array(entries, d)}
    weights["table"] = array(c.target_vocab_size or c.vocab_size, d)
    cache, memory = ([[array(rows, size, h, k)] * 2] * layers for size in (entries, LENGTH if reads else 0))
    lowered = jax.jit(run).lower(weights, cache, memory, array(rows, dtype=jnp.int32))
    return figures(lowered.compile(compiler_options(chips.devices[0].platform)), make_mesh(-1, 1, 1, chips.devices))


def weights(model: ModelConfig) -> int:
    """Return the bytes of a step's weights in bfloat16: the layers, except those that read a source, and a table."""
    shapes = param_shapes(build_model(model))
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)}
    once = ("['cross_attn']['k']", "['cross_attn']['v']")
    layers = sum(
        size for path, size in sizes.items() if "['decoder']" in path and not any(each in path for each in once)
    )
    return 2 * (layers + model.d_model * (model.target_vocab_size or model.vocab_size))


def cache(model: ModelConfig, rows: int, beam: int) -> int:
    """Return the bytes of a cache in bfloat16: the entries of all beams, and of a prompt or source."""
    entries = ROOM * beam + LENGTH
    layers = model.num_decoder_layers or model.num_layers
    return 2 * rows * layers * entries * model.kv_heads * (model.key_size + model.value_size)


def row_of(found: Figures, model: ModelConfig, rows: int, beam: int, chips: Topology) -> tuple[list[str], list[Kernel]]:
    """Return the cells of a search, and the kernels of its steps."""
    step = [kernel for kernel in largest_kernels(found.program) if kernel.times >= ROOM - 1]
    moved = sum(kernel.bytes for kernel in step) / ROOM
    parts = weights(model), cache(model, rows, beam)
    return [
        f"{rows}", f"{beam}", f"{sum(kernel.times for kernel in step) / ROOM:,.0f}", f"{moved / 1e6:,.1f}",
        *(f"{part / 1e6:,.1f}" for part in parts), f"{moved / sum(parts):.2f}", f"{found.temporaries / GIB:.2f} GiB",
        f"{rows * chips.chip.bandwidth / moved:,.0f}",
    ], step  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Print a row for every search."""
    del argv
    smoke_sizes(models=["tiny"], rows=["2"], beams=["1"], topology=["v5e:1x1"], sides=["ours", "plain"])
    if not {*SIDES.value} <= {"ours", "plain"}:
        raise app.UsageError(f"--sides={','.join(SIDES.value)}: there are ours and plain")
    for chips in map(open_topology, TOPOLOGIES.value or ["h100"]):
        print(
            f"{chips.name}, {LENGTH} tokens and {ROOM} more\n{'model':<10}" + "".join(f"{head:>11}" for head in HEADS)
        )
        for name, rows, beam, side in itertools.product(
            MODELS.value, map(int, ROWS.value), map(int, BEAMS.value), SIDES.value
        ):
            model = resolved(UPDATES[name])[2]
            if side == "plain" and beam > 1:
                continue
            found = search(UPDATES[name], rows, beam, chips) if side == "ours" else plain_search(model, rows, chips)
            cells, kernels = row_of(found, model, rows, beam, chips)
            print(f"{name:<10}" + "".join(f"{cell:>11}" for cell in (side, *cells)), flush=True)
            print_kernels(kernels, ROOM)


if __name__ == "__main__":
    app.run(main)
