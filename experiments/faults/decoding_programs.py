"""What does a decoded token cost? Searches compiled for absent chips, against reading what they need once.

Nothing is run. A step is what runs once a token; its ideal reads the weights that it multiplies by and all entries of
the cache once, in bfloat16. A greedy search decodes one sentence as two rows. Needs libtpu or the CUDA plugin:
pip install -e ".[tpu-aot]" or ".[gpu-aot]".

Command:  python -m experiments.faults.decoding_programs [--topology=h100] [--models=base,gpt2_1k] [--rows=2,32,256]
          [--beams=1,4] [--kernels=5] [--smoke]      (10 to 60 seconds each)
"""

import itertools
from collections.abc import Sequence

import jax
from absl import app, flags

from experiments.faults.programs import UPDATES, Update, resolved
from experiments.measure import smoke_sizes
from jformer.data.plan import Shape
from jformer.models import ModelConfig, build_model, init_params
from jformer.parallel.mesh import make_mesh
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer
from jformer.tools.forecast.cost_analysis import Kernel, largest_kernels
from jformer.tools.forecast.topology import GIB, Topology, open_topology

MODELS = flags.DEFINE_list("models", ["base", "gpt2_1k"], "Rows of UPDATES.")
ROWS = flags.DEFINE_list("rows", ["2", "32", "256"], "Sentences of a batch.")
BEAMS = flags.DEFINE_list("beams", ["1", "4"], "Beam sizes; 1 = greedy.")
TOPOLOGY = flags.DEFINE_string("topology", "h100", "One chip: v5e:1x1, v6e:1x1 or h100.")
LARGEST = flags.DEFINE_integer("kernels", 0, "How many kernels of a step to list.")
LENGTH, ROOM = 128, 128  # tokens of a source or prompt, and of an output
HEADS = ("rows", "beam", "kernels", "MB a step", "weights", "cache", "of ideal", "temps", "tokens/s")


def search(update: Update, rows: int, beam: int, chips: Topology) -> tuple[Figures, ModelConfig]:
    """Return the figures of a search, and its model."""
    options = {**update.options, "decode.beam_size": beam, "decode.dtype": "bfloat16"}
    config, task, model = resolved(update._replace(options=options))
    mesh = make_mesh(-1, 1, 1, chips.devices)
    return compile_answer(config, task, model, Shape(rows, LENGTH, ROOM), mesh), model


def weights(model: ModelConfig) -> int:
    """Return the bytes of a step's weights in bfloat16: the layers, except those that read a source, and a table."""
    shapes = jax.eval_shape(lambda key: init_params(build_model(model), key), jax.random.key(0))
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
    smoke_sizes(models=["tiny"], rows=["2"], beams=["1"], topology="v5e:1x1")
    chips = open_topology(TOPOLOGY.value)
    print(f"{chips.name}, {LENGTH} tokens and {ROOM} more\n{'model':<10}" + "".join(f"{head:>11}" for head in HEADS))
    for name, rows, beam in itertools.product(MODELS.value, map(int, ROWS.value), map(int, BEAMS.value)):
        found, model = search(UPDATES[name], rows, beam, chips)
        cells, kernels = row_of(found, model, rows, beam, chips)
        print(f"{name:<10}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
        for kernel in kernels[: LARGEST.value]:
            print(f"    {kernel.bytes / ROOM / 1e6:8.2f} MB  {kernel.makes:.60}  {kernel.source[-90:]}")


if __name__ == "__main__":
    app.run(main)
