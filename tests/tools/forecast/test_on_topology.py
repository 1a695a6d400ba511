import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding

from experiments.faults.program_quality import gathered_twice
from jformer.config import default_config, resolve
from jformer.data.plan import Shape
from jformer.errors import UserError
from jformer.main import main
from jformer.models import build_model, param_shapes
from jformer.models.flops import update_flops, work_of
from jformer.parallel.backend import Target
from jformer.parallel.mesh import make_mesh
from jformer.tasks.build import build_task
from jformer.tasks.task import sized
from jformer.tools.forecast import on_topology
from jformer.tools.forecast.collectives import Collective
from jformer.tools.forecast.compiled_ahead import Figures, compile_answer, compile_update, estimate, figures
from jformer.tools.forecast.cost_analysis import traffic
from jformer.tools.forecast.hlo import parse
from jformer.tools.forecast.on_topology import describe_topology, larger_share_note, ways_to_fit
from jformer.tools.forecast.roofline import bound
from jformer.tools.forecast.shapes import answer_shape, full_shape, mesh_sizes
from jformer.tools.forecast.topology import CHIPS, GPUS, Topology, compiler_options, open_topology
from tests.tools.forecast.test_topology import needs_cuda_compiler, needs_libtpu

VOCABULARY = 512
SMALL = {"num_layers": 2, "d_model": 128, "d_ff": 256, "num_heads": 2, "dtype": "bfloat16"}
ROWS, LENGTH = 8, 32  # of a chip


def resolved(preset="transformer_tiny", **options):
    config = default_config(preset)
    config.update_from_flattened_dict(options)
    return resolve(config)


def small(**options):
    config = default_config("transformer_tiny")
    config.model.update(SMALL)
    config.data.update(max_source_length=LENGTH, max_target_length=LENGTH, vocab_size=VOCABULARY)
    config.update_from_flattened_dict(options)
    return resolve(config)


def modelled(config, vocabulary=VOCABULARY):
    return sized(config.model, build_task(config), vocabulary, vocabulary)


@functools.cache
def compiled(name, fsdp=1):
    """Compile the update of a small model, with the same rows for every chip of a slice."""
    config, devices = small(), open_topology(name).devices
    shape = Shape(ROWS * len(devices), LENGTH, LENGTH)
    return compile_update(config, build_task(config), modelled(config), shape, make_mesh(-1, fsdp, 1, devices))


def gradient_bytes(model):
    shapes = param_shapes(build_model(model))
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes))


def over(figures, *axes):
    return [each for each in figures.collectives if each.axes == axes]


@pytest.mark.slow
@needs_libtpu
def test_data_parallel_gradients_meet_in_one_all_reduce():
    found = over(compiled("v5e:2x2"), "data")
    gradients = gradient_bytes(modelled(small()))
    assert [(each.kind, each.times) for each in found] == [("all-reduce", 1)]
    assert gradients <= found[0].bytes < 1.02 * gradients
    assert compiled("v5e:2x2").collectives == found


@pytest.mark.slow
@needs_libtpu
def test_fsdp_moves_parts_of_parameters_and_gradients_and_no_whole_gradient():
    figures, gradients = compiled("v5e:2x4", fsdp=4), gradient_bytes(modelled(small()))
    moved = over(figures, "fsdp")
    assert {each.kind for each in moved} >= {"all-gather"}
    scattering = {"reduce-scatter", "collective-permute", "all-to-all"}
    assert sum(each.bytes for each in moved if each.kind in scattering) >= gradients / 2  # they are bfloat16
    whole = [each for each in figures.collectives if each.kind == "all-reduce" and "fsdp" in each.axes]
    assert sum(each.bytes for each in whole) < gradients / 20  # biases and norms lie whole everywhere
    (between,) = over(figures, "data")
    assert between.kind == "all-reduce"
    assert gradients / 4 <= between.bytes < 1.3 * gradients / 4
    assert not gathered_twice(figures.program, {"data": 2, "fsdp": 4, "tensor": 1}, SMALL["num_layers"])


@pytest.mark.slow
@needs_libtpu
def test_twice_the_chips_with_as_many_tokens_each_take_as_much_of_a_chip():
    few, many = compiled("v5e:2x2"), compiled("v5e:2x4")
    assert many.flops == few.flops
    assert many.memory == pytest.approx(few.memory, rel=0.02)
    assert many.traffic == pytest.approx(few.traffic, rel=0.02)
    model = modelled(small())
    lengths = np.full(ROWS, LENGTH)
    assert few.flops == pytest.approx(update_flops(model, work_of(lengths, lengths)), rel=0.02)


@needs_libtpu
def test_temporaries_are_the_arrays_that_are_alive_at_once():
    mesh = make_mesh(devices=open_topology("v5e:2x2").devices)
    place = SingleDeviceSharding(mesh.devices.flat[0])
    kernels = jax.ShapeDtypeStruct((6, 1024, 1024), jnp.bfloat16, sharding=place)
    x = jax.ShapeDtypeStruct((65536, 1024), jnp.bfloat16, sharding=place)

    def total(kernels, x):
        return jnp.sum(lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0].astype(jnp.float32) ** 2)

    compiled = jax.jit(jax.grad(total)).lower(kernels, x).compile()
    each = 2 if jax.__version_info__ >= (0, 12) else 3  # inputs and slopes; JAX 0.10 keeps the slope's factors
    alive = 6 * each + 2  # the gradient before and after a layer
    assert figures(compiled, mesh).temporaries == pytest.approx(alive * 2 * x.size, rel=0.01)


@pytest.mark.slow
@needs_libtpu
def test_fsdp_stores_a_part_of_the_state():
    whole, parts = compiled("v5e:2x4"), compiled("v5e:2x4", fsdp=4)
    assert parts.arguments < 0.3 * whole.arguments
    assert parts.flops == pytest.approx(whole.flops, rel=0.01)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["v5e:2x2", "v5e:16x16", "v6e:4x4"])
def test_transformer_big_compiles(name):
    config = resolved("transformer_big", **{"model.dtype": "bfloat16"})
    devices = open_topology(name).devices
    shape = Shape(4 * len(devices), 64, 64)
    figures = compile_update(config, build_task(config), modelled(config, 37_000), shape, make_mesh(devices=devices))
    lengths = np.full(4, 64)
    assert figures.flops == pytest.approx(update_flops(modelled(config, 37_000), work_of(lengths, lengths)), rel=0.02)
    assert figures.memory < CHIPS[name.split(":")[0]].hbm


@pytest.mark.slow
@needs_libtpu
def test_a_batch_of_answers_compiles_and_exchanges_nothing_but_the_answers():
    config = small(**{"decode.beam_size": 2, "decode.batch_size": 10, "decode.max_extra_length": 8})
    mesh, task = make_mesh(devices=open_topology("v5e:2x2").devices), build_task(config)
    shape = answer_shape(config, task, mesh)
    assert shape == Shape(12, LENGTH, LENGTH + 8)
    figures = compile_answer(config, task, modelled(config), shape, mesh)
    assert figures.flops > 0
    assert sum(each.bytes for each in figures.collectives) < 100_000


@needs_libtpu
def test_forecasts_in_the_documents_get_as_far_as_the_compiler(monkeypatch, capsys):
    def stop(*_):
        raise UserError("compiling")

    monkeypatch.setattr(on_topology, "compile_update", stop)
    commands = {
        match[1]
        for path in (Path(__file__).parents[3] / "docs").glob("*.md")
        for match in re.finditer(r"jformer\.main((?:\s+--[\w.]+=[^\s`]+)+)", path.read_text().replace("\\\n", " "))
        if "--topology=v" in match[1]
    }
    assert len(commands) >= 3
    for command in commands:
        assert main(["", *command.split()]) == 2
        assert capsys.readouterr().err.endswith("compiling\n"), command


@pytest.mark.slow
@needs_libtpu
def test_the_page_says_what_a_run_takes_of_a_slice():
    config = small(**{"data.tokens_per_update": 1_024, "decode.batch_size": 8, "train.num_steps": 5_000})
    text = "\n".join(describe_topology(config, None, "v5litepod-4", 1.2))
    assert "slice: v5e:2x2, 4 chips of 16 GiB; mesh data=4 x sequence=1 x fsdp=1 x tensor=1" in text
    assert "update: 32 full rows of 32 + 32, 8 for a chip" in text
    for words in (
        "memory by estimate: ",
        "memory by the compiler: ",
        "all-reduce",
        "MFU at most ",
        "target tokens/s",
    ):
        assert words in text
    assert re.search(r"\$[\d.e-]+ to \$[\d.e-]+ for a million such tokens", text)
    assert "for 5,000 updates" in text
    assert "answers: 8 inputs of 32, at most 82 tokens each" in text


@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_ends_with_what_would():
    config = small(**{"data.tokens_per_update": 2**23, "data.max_source_length": 512, "data.max_target_length": 512})
    with pytest.raises(
        UserError, match=r"the update does not fit: it needs [\d.]+ GiB of a chip's 16; by estimate it "
    ) as e:
        list(describe_topology(config, None, "v5e:2x2", 0.0))
    assert "data.tokens_per_update=" in str(e.value)


@pytest.mark.slow
@needs_libtpu
def test_a_mesh_that_the_slice_does_not_have_is_refused():
    with pytest.raises(UserError, match="does not fit 4 devices"):
        list(describe_topology(small(**{"mesh.fsdp": 3}), None, "v5e:2x2", 0.0))


@needs_libtpu
def test_lengths_are_chosen_for_as_many_rows_as_training_has():
    limits = {"data.max_source_length": 1_000, "data.max_target_length": 1_000, "data.tokens_per_update": 16_000}
    lines = describe_topology(small(**limits), None, "v5e:4x4", 0.0)  # 16 rows of 1,024 would not fit, 8 would
    assert next(each for each in lines if "update:" in each) == "\nupdate: 16 full rows of 1,000 + 1,000, 1 for a chip"


def pretended(count):
    device = dataclasses.make_dataclass("Device", ["platform", "device_kind"])("tpu", "TPU v5 lite")
    return Topology(f"v5e:{count}", CHIPS["v5e"], [device] * count)


@pytest.mark.slow
def test_what_would_fit_is_tried_by_estimate():
    config = small(**{"data.tokens_per_update": 2**16, "data.row_multiple": 16, "mesh.data": 4})
    task, model = build_task(config), modelled(config)
    memory = estimate(config, task, model, full_shape(config), 4, Target("tpu"))
    state = sum(memory) - memory.activations - memory.batch
    ways = ways_to_fit(config, task, model, pretended(4), CHIPS["v5e"].hbm / (0.6 * memory.activations + state))
    assert "model.execution.remat=full" in ways or "model.execution.remat=dots" in ways
    assert "train.accumulation=2" in ways
    assert "data.tokens_per_update=32768" in ways
    config = small(**{"data.tokens_per_update": 2**9})  # on 2 chips a mesh has no 4, even where only 4 would do
    memory = estimate(config, task, model, full_shape(config), 2, Target("tpu"))
    assert "mesh.fsdp=" not in ways_to_fit(config, task, model, pretended(2), CHIPS["v5e"].hbm / (0.4 * sum(memory)))


@pytest.mark.slow
def test_the_mesh_is_filled_up_and_estimates_follow_it():
    config = small(**{"mesh.fsdp": 4})
    assert mesh_sizes(config, 16) == {"data": 4, "sequence": 1, "fsdp": 4, "tensor": 1}
    task, model, shape = build_task(config), modelled(config), Shape(32, LENGTH, LENGTH)
    parts = estimate(config, task, model, shape, 16, Target("tpu"))
    whole = estimate(small(), task, model, shape, 16, Target("tpu"))
    assert parts.optimizer < 0.3 * whole.optimizer
    assert parts.batch == whole.batch
    with pytest.raises(UserError, match=r"^mesh.sequence=8 x mesh.tensor=1 is more than the \d key/value heads"):
        estimate(small(**{"mesh.sequence": 8}), task, model, shape, 16, Target("tpu"))


@pytest.mark.slow
def test_the_bound_is_the_longest_of_three_times_or_their_sum():
    chips = Topology("v5e:2x2", CHIPS["v5e"], [dataclasses.make_dataclass("Device", ["device_kind"])("TPU v5 lite")])
    gather = Collective("all-gather", ("fsdp",), 4, 1, int(4 / 3 * 200e9))
    least = bound(Figures(0, 0, 0, 0, 2 * 197e12, 3 * 819e9, [gather], {}), chips)
    assert least == pytest.approx((2.0, 3.0, 1.0))
    assert (least.overlapped, least.apart) == pytest.approx((3.0, 6.0))


@pytest.mark.parametrize(
    ("devices", "machines", "seconds"), [(8, 1, 7 / 4), (8, 2, 9 / 4), (2, 2, 9.0)], ids=["inside", "shared", "alone"]
)
def test_gpus_of_a_machine_share_what_a_group_sends_to_other_machines(devices, machines, seconds):
    gathered = Collective("all-gather", ("data",), devices, 1, int(900e9), machines)
    chips = Topology("h100:4x2", GPUS["h100"], [dataclasses.make_dataclass("Device", ["device_kind"])("NVIDIA H100")])
    least = bound(Figures(0, 0, 0, 0, 989.4e12, 0, [gathered], {}), chips, "float32")
    assert (least.network, least.products) == pytest.approx((seconds, 2.0))


def test_a_program_between_jaxs_share_and_the_gpus_memory_needs_a_larger_share():
    gpus, tpus = Topology("h100", GPUS["h100"], []), Topology("v5e:2x2", CHIPS["v5e"], [])
    note = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.86 in the environment is enough for it, and "
    assert larger_share_note(0.851 * GPUS["h100"].hbm, gpus) == note
    assert larger_share_note(0.95 * GPUS["h100"].hbm, gpus) == larger_share_note(2**34, tpus) == ""


def test_a_program_that_does_not_fit_needs_its_arguments_once():
    def give_up():
        raise RuntimeError("the program (100.00G) exceeds available HBM")

    gpus, arguments = Topology("h100", GPUS["h100"], []), 2**30
    compiled_anyway = Figures(arguments, 0, 2**40, 0, 0.0, 0.0, [], {})
    assert on_topology._compiled("update", gpus, lambda: compiled_anyway, arguments) == 2**40 + arguments
    assert on_topology._compiled("update", gpus, give_up, arguments) == 101 * 2**30


@pytest.mark.parametrize(("given", "dtype"), [("", "float32"), ("bfloat16", "bfloat16")])
def test_answers_are_forecast_in_the_dtype_of_decoding(monkeypatch, given, dtype):
    config, found = small(**{"model.dtype": "float32", "decode.dtype": given}), []
    gpus = Topology("h100", GPUS["h100"], [dataclasses.make_dataclass("Device", ["device_kind"])("NVIDIA H100")])
    program = Figures(0, 0, 0, 0, 1e15, 0.0, [], {})
    monkeypatch.setattr(on_topology, "compile_answer", lambda *given: found.append(given[2].dtype) or program)
    monkeypatch.setattr(on_topology, "kernels", lambda program: 0)
    lines = list(on_topology._answer_lines(config, build_task(config), modelled(config), gpus, make_mesh(1), 0.0))
    assert found == [dtype]
    assert f"products {1e18 / gpus.peak_in(dtype, 'default'):,.2f}" in "\n".join(lines)


@pytest.mark.slow
@needs_cuda_compiler
def test_the_page_says_what_a_run_takes_of_gpus():
    config = small(**{"data.tokens_per_update": 1_024, "decode.batch_size": 8, "mesh.tensor": 2})
    lines = list(describe_topology(config, None, "h100:4", 2.0))
    text = "\n".join(lines)
    assert "GPUs: 4 x NVIDIA H100 80GB HBM3 on one machine, 79 GiB each, of which JAX takes 75%; mesh data=2" in text
    assert "update: 32 full rows of 32 + 32, 16 for a GPU" in text
    assert "attention kernel: cudnn" in text
    useful, once = map(float, re.search(r"([\d.e+]+) FLOPs of the model; the program has ([\d.e+]+)", text).groups())
    assert once == pytest.approx(useful, rel=0.02)
    assert not {"slice", "chip"} & set(re.findall(r"\w+", text))


@pytest.mark.slow
@needs_cuda_compiler
def test_what_no_gpu_can_hold_ends_with_what_would_fit():
    config = small(**{"data.tokens_per_update": 2**24, "data.max_source_length": 512, "data.max_target_length": 512})
    with pytest.raises(UserError, match=r"does not fit: it needs [\d.]+ GiB of a GPU's 59; .*data.tokens_per_update="):
        list(describe_topology(config, None, "h100", 0.0))


def layer(x, weights):
    return x + jax.nn.relu(x @ weights[0]) @ weights[1]


def layers_written_out(x, weights, slope):
    y, pull_back = jax.vjp(lambda x, weights: functools.reduce(layer, weights, x), x, weights)
    return y, pull_back(slope)


def layers_in_a_loop(x, weights):
    return lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]


def adam_in_a_loop(*arrays):
    def update(_, each):
        parameter, mean, variance, slope = each
        mean, variance = 0.9 * mean + 0.1 * slope, 0.98 * variance + 0.02 * slope**2
        return None, (parameter - 1e-3 * mean / (jnp.sqrt(variance) + 1e-9), mean, variance)

    return lax.scan(update, None, arrays)[1]


@jax.value_and_grad
def nll(logits, targets):
    z = logits.astype(jnp.float32)
    hit = jnp.arange(z.shape[-1]) == targets[:, None]
    return jnp.sum(jax.nn.logsumexp(z, axis=-1) - jnp.where(hit, z, 0).sum(axis=-1))


TOKENS, WIDTH, HIDDEN, ENTRIES = 2**16, 1_024, 4_096, 8_192  # arrays that fit beside no core
A, H, W = 2 * TOKENS * WIDTH, 2 * TOKENS * HIDDEN, 2 * WIDTH * HIDDEN  # bytes of activations, hidden ones and weights
Z, P = 2 * TOKENS * ENTRIES, 4 * 8 * HIDDEN**2  # of logits, and of parameters in a stack of eight
LOOP, GPU_LOOP = 4 * (3 * A + 2 * H + 2 * W) + 2 * A, 4 * (5 * A + 2 * H + 4 * W) + 2 * A
BY_HAND = {  # bytes on v5e, v6e and h100
    # Each of the six products of a layer reads and writes its arrays once, and two of them x or its gradient as well;
    # one more reads what ReLU had. A GPU has kernels for ReLU and for its gradient, and one for both in the last layer.
    "layers written out": (layers_written_out, *[2 * (8 * A + 7 * H + 6 * W)] * 2, 2 * (8 * A + 11 * H + 6 * W) - H),
    # The loop copies x before the first layer. v6e has both products of a layer in one kernel, for which each layer
    # copies x; so does a GPU, and half of the weights.
    "layers in a loop": (layers_in_a_loop, LOOP, LOOP + 4 * (A - 2 * H), GPU_LOOP),
    # 4 are read and 3 written; the loop writes others than it was given, which are copied. A GPU fills them first, and
    # has a kernel for each result: two read two, and the parameters' all four.
    "adam in a loop": (adam_in_a_loop, (7 + 6) * P, (7 + 6) * P, (11 + 6 + 3) * P),
    "loss": (nll, 4 * Z, 4 * Z, 4 * Z),  # read for the maximum, the sum and the gradient, which is written
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(each, marks=needs_libtpu) for each in ("v5e", "v6e")),
        pytest.param("h100", marks=needs_cuda_compiler),
    ],
)
@pytest.mark.parametrize("program", BY_HAND)
def test_bytes_are_those_counted_by_hand(name, program):
    topology = open_topology(f"{name}:2x2" if name in CHIPS else name)
    where = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def given(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    x, stack = given(TOKENS, WIDTH), given(8, HIDDEN, HIDDEN, dtype=jnp.float32)
    arguments = {
        "layers written out": (x, [(given(WIDTH, HIDDEN), given(HIDDEN, WIDTH))] * 2, x),
        "layers in a loop": (x, (given(4, WIDTH, HIDDEN), given(4, HIDDEN, WIDTH))),
        "adam in a loop": (stack,) * 4,
        "loss": (given(TOKENS, ENTRIES), given(TOKENS, dtype=jnp.int32)),
    }[program]
    function, *by_hand = BY_HAND[program]
    expected = by_hand[("v5e", "v6e", "h100").index(name)]
    donated = (0, 1, 2) if function is adam_in_a_loop else ()
    options = compiler_options(topology.devices[0].platform)
    compiled = jax.jit(function, donate_argnums=donated).lower(*arguments).compile(options)
    moved, own = traffic(parse(compiled.as_text())), dict(compiled.cost_analysis() or {}).get("bytes accessed", 0)
    print(f"\n{name}, {program}: {expected / 1e9:.3f} GB by hand, {moved / 1e9:.3f} counted, {own / 1e9:.3f} by XLA")
    assert moved == pytest.approx(expected, rel=0.01)


@needs_libtpu
@pytest.mark.parametrize("shape", [(12, 65_536), (512, 300), (5, 3, 1_000)])
def test_padding_of_arrays_counts_as_xla_counts_it(shape):
    place = SingleDeviceSharding(open_topology("v5e:2x2").devices[0])
    compiled = jax.jit(lambda x: 2 * x).lower(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)).compile()
    moved, expected = traffic(parse(compiled.as_text())), dict(compiled.cost_analysis() or {})["bytes accessed"]
    assert moved == expected > 2 * 2 * math.prod(shape)
