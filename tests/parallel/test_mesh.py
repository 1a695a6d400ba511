"""On any mesh devices share the work, exchange no more than their shards, answer alike and go on with others' runs."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from jformer.config import resolve
from jformer.data.tokenizers import learn
from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import Request
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained
from jformer.models import ExecutionConfig
from jformer.parallel.mesh import axes_between_slices, make_mesh, slices_line
from jformer.parallel.sharding import parameter_shardings, put_batch
from jformer.tasks.build import build_task
from jformer.tasks.task import make_loss, token_loss
from jformer.tools.forecast.collectives import collectives
from jformer.tools.forecast.cost_analysis import flops
from jformer.tools.forecast.hlo import parse
from jformer.tools.forecast.topology import open_topology
from jformer.trainer import train
from jformer.training.step import make_gradient
from tests.conftest import make_batch
from tests.opening import opened
from tests.slow import slow_but
from tests.tools.forecast.test_topology import needs_libtpu
from tests.training.test_loop import rows, small
from tests.training.test_step import MESHES as UPDATED
from tests.training.test_step import distance

WIDE = {"family": "decoder", "num_heads": 8, "d_model": 64, "d_ff": 128, "vocab_size": 512, "dropout": 0.1}
THREE, DROPPED = {"num_heads": 6, "num_kv_heads": 3, "d_model": 48}, {"attention_dropout": 0.2}
BATCH = make_batch([16] * 32, [16] * 32, vocab_size=512)


@pytest.fixture(scope="module")
def program(tiny):
    """Return a function: sizes of a mesh → what its devices run for a gradient, and the bytes of a device's shards."""
    model, params = tiny(**WIDE)

    @functools.cache
    def compile_for(*sizes):
        mesh = make_mesh(*sizes)
        placed = jax.device_put(params, parameter_shardings(mesh, params))
        batch = put_batch(mesh, {name: x[None] for name, x in BATCH.items()})
        gradient = make_gradient(make_loss(model, token_loss(0.1)), mesh)
        text = jax.jit(gradient).lower(placed, batch, jax.random.key(0)).compile().as_text()
        return parse(text), sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))

    return compile_for


MESHES = [(2, 2, 2), (1, 8, 1), (8, 1, 1), (1, 1, 8)]
shapes = functools.partial(pytest.mark.parametrize, "sizes", ids=lambda sizes: "x".join(map(str, sizes)))


@pytest.mark.slow
@shapes(MESHES)
def test_each_device_does_its_share_of_the_products(program, sizes):
    share = flops(program(*sizes)[0]) / flops(program(1, 1, 1)[0])
    assert share == pytest.approx(1 / 8, rel=0.05)


@shapes(slow_but(MESHES, (2, 2, 2)))
def test_only_shards_of_gradients_cross_the_data_axis(program, sizes):
    compiled, shards = program(*sizes)
    crossing = [each for each in collectives(compiled, make_mesh(*sizes).shape) if "data" in each.axes]
    assert {(each.kind, each.axes) for each in crossing} == ({("all-reduce", ("data",))} if sizes[0] > 1 else set())
    assert sum(each.bytes for each in crossing) == (
        shards + 4 * 4 if sizes[0] > 1 else 0
    )  # and three sums of one count


@shapes(slow_but([(2, 2, 2), (1, 8, 1)], (2, 2, 2)))
def test_kernels_are_gathered_over_fsdp_and_activations_are_not(program, tiny, sizes):
    compiled, _ = program(*sizes)
    gathered = [each for each in collectives(compiled, make_mesh(*sizes).shape) if each.kind == "all-gather"]
    assert {each.axes for each in gathered} == {("fsdp",)}
    kernels = sum(x.nbytes for x in jax.tree.leaves(tiny(**WIDE)[1]) if x.ndim > 1 and min(x.shape[-2:]) > 1)
    positions, tokens = BATCH["target_in"].size // sizes[0], 4 * (64 + 1)
    # Each kernel twice, forward and backward; of activations only the gradient of what was looked up in the table.
    assert sum(each.bytes for each in gathered) <= 2 * kernels / sizes[2] * 1.1 + 2 * positions * tokens


@pytest.fixture(scope="module")
def answers(tiny):
    """Return a function: sizes of a mesh and a search → outputs with their scores, of an untrained model."""
    tokenizer = learn("char", ["abcdefgh "], 99, "identity", False)
    model, params = tiny(num_layers=1, d_ff=48, num_heads=8, tied_output=False, vocab_size=24)

    @functools.cache
    def answer(sizes, name):
        options = {"batch_size": 4, "max_extra_length": 6, **SEARCHES[name]}
        config = dataclasses.replace(resolve({"data": {"max_source_length": 64}}), decode=DecodeConfig(**options))
        mesh = make_mesh(*sizes)
        placed = jax.device_put(params, parameter_shardings(mesh, params, whole=["fsdp"]))
        run = Trained(config=config, task=build_task(config), tokenizers=(tokenizer,) * 2, model=model, params=placed)
        predictor = Predictor(run, mesh=mesh)
        requests = [Request(text, line=i) for i, text in enumerate(["abc", "hgfedcba hgfe", "", "b", "cab", "ha"])]
        outputs = predictor.generate(requests)
        scored = predictor.score([("abc", "cba"), ("ha", "ah"), ("b", "")])
        return outputs, scored

    return answer


SEARCHES = {
    "beam": {"beam_size": 4, "n_best": 3},
    "greedy": {"beam_size": 1},
    "sample": {"search": "sample", "beam_size": 1, "top_k": 9},
    "mbr": {"search": "mbr", "samples": 3, "beam_size": 1},
    "covered": {"beam_size": 2, "coverage_penalty": 0.2, "alignments": True},
    "diverse": {"beam_size": 4, "beam_groups": 2, "diversity": 0.5, "no_repeat_ngram": 2},
}


# Beam search on every kind of mesh, every search on one that has everything.
CASES = [(sizes, "beam") for sizes in UPDATED[:4]] + [((2, 2, 2), name) for name in SEARCHES if name != "beam"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "name"), CASES, ids=["-".join([name, "x".join(map(str, sizes))]) for sizes, name in CASES]
)
def test_answers_are_those_of_one_device(answers, sizes, name):
    (expected, expected_scores), (found, scores) = answers((1, 1, 1), name), answers(sizes, name)
    assert [[output.ids for output in each] for each in found] == [[o.ids for o in each] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert [o.score is None for o in one] == [o.score is None for o in other]  # as for an empty input
        np.testing.assert_allclose(
            *([o.score for o in each if o.score is not None] for each in (one, other)), rtol=1e-5
        )
    np.testing.assert_allclose([s.log_prob for s in scores], [s.log_prob for s in expected_scores], rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_mesh_and_is_the_same_run(tmp_path):
    sizes = {"data__vocab_size": 60, "train__num_steps": 20, "train__ema_decay": 0.9}
    options = {**sizes, "mesh__data": 1, "model__vocab_size": 40, "model__num_heads": 4}
    train(small(tmp_path / "cache", **options), tmp_path / "one")
    moved = {**options, "train__num_steps": 10}
    for turn, mesh in enumerate([(2, 2, 2, 1), (1, 2, 2, 2)]):
        axes = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor", "mesh__sequence"), mesh, strict=True))
        train(small(tmp_path / "cache", **{**moved, **axes, "train__num_steps": 10 * (turn + 1)}), tmp_path / "moved")
    before, after = rows(tmp_path / "one", "train"), rows(tmp_path / "moved", "train")
    assert [row["step"] for row in after] == [row["step"] for row in before]
    for row, other in zip(before, after, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
    states = [opened(small(tmp_path / "cache", **o), tmp_path / "moved").state for o in (options, {**options, **axes})]
    for leaf, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(leaf, other)  # the same bits wherever they lie


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 1], ids=["own", "shared"])
def test_devices_share_the_scores_of_distances_by_heads(tiny, layers):
    model, params = tiny(**WIDE, positions="transformer_xl", shared_layers=layers == 1)
    found = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(*sizes)
        placed = jax.device_put(params, parameter_shardings(mesh, params))
        kernel = placed["decoder"]["block"]["self_attn"]["distance"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (layers, 64 // sizes[1], 64 // sizes[2])
        batch = put_batch(mesh, {name: x[None] for name, x in BATCH.items()})
        gradient = make_gradient(make_loss(model, token_loss(0.1)), mesh)
        found.append(jax.device_get(jax.jit(gradient)(placed, batch, jax.random.key(0))))
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(found[0][0])))
    for one, shared in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, shared, rtol=1e-5, atol=1e-6 * norm)


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        # Two devices do not divide three heads of keys; without dropout of weights they need not divide lengths either.
        ((1, 1, 1, 2), {"family": "decoder", "positions": "relative", "window": 3, **THREE, **DROPPED}),
        pytest.param((1, 2, 2, 2), {"positions": "alibi", "num_heads": 4}, marks=pytest.mark.slow),
        pytest.param(
            (2, 1, 1, 4), {"family": "decoder", "positions": "rotary", "num_heads": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            (1, 1, 1, 2), {"execution": ExecutionConfig(attention_chunk=3), **DROPPED}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_devices_share_packed_rows_by_positions_and_attend_by_heads(tiny, sizes, fields):
    model, params = tiny(**{"num_layers": 1, "dropout": 0.2, **fields})
    batch = make_batch([8 if "attention_dropout" in fields else 7] * 4, [6] * 4)
    batch["source_segments"][:, 3:], batch["target_segments"][:, 4:] = 2, 2
    if "family" in fields:
        batch["target_prefix"] = np.tile(np.arange(6) % 4 < 2, (4, 1))
    found = []
    for data, fsdp, tensor, sequence in ((1, 1, 1, 1), sizes):
        mesh = make_mesh(data, fsdp, tensor, sequence=sequence)
        placed = jax.device_put(params, parameter_shardings(mesh, params))
        arguments = placed, put_batch(mesh, {name: x[None] for name, x in batch.items()}), jax.random.key(0)
        compiled = jax.jit(make_gradient(make_loss(model, token_loss(0.1)), mesh)).lower(*arguments).compile()
        found.append(jax.device_get(compiled(*arguments)))
        exchanged = [each for each in collectives(parse(compiled.as_text()), mesh.shape) if "sequence" in each.axes]
    assert distance(found[1][0], found[0][0]) < 1e-6
    np.testing.assert_allclose(jax.tree.leaves(found[1][1]), jax.tree.leaves(found[0][1]), rtol=1e-6)
    assert {each.kind for each in exchanged} == {"all-to-all", "all-gather", "all-reduce"}
    gathered = sum(each.bytes for each in exchanged if each.kind == "all-gather")
    assert gathered <= 2 * 4 * 4 * (8 + 8) // sizes[0]  # segments of both sides, once for each stack that reads them


def test_a_model_that_needs_whole_rows_is_refused_where_devices_share_them(tiny):
    model, params = tiny(positions="transformer_xl")
    gradient = make_gradient(make_loss(model, token_loss(0.0)), make_mesh(1, sequence=3))
    with pytest.raises(UserError, match=r"^mesh.sequence=3: model.positions='transformer_xl' needs whole rows: set"):
        jax.eval_shape(gradient, params, {name: x[None] for name, x in BATCH.items()}, jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Fake:
    """A GPU that is not there: what a mesh asks of one."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("machines", "sizes", "across", "note"),
    [
        ((0, 0, 0, 0), (2, 2, 1), (), ""),
        ((0, 0, 0, 0, 1, 1, 1, 1), (2, 2, 2), ("data",), "mesh: data across 2 machines, joined by a slower network"),
        ((0, 1) * 4, (2, 2, 2), ("data",), "data across 2 machines"),  # in whatever order they are listed
        ((0,) * 6 + (1,) * 6, (3, 2, 2), ("fsdp",), "fsdp across 2 machines"),  # 2 does not divide data
        ((0, 0, 1, 1, 2, 2, 3, 3), (2, 2, 2), ("data", "fsdp"), "data and fsdp across 4 machines"),
        ((0, 0, 1, 1), (1, 1, 4), ("tensor",), "which tensor uses in every layer: mesh.tensor at most 2 stays within"),
        (
            (0, 0, 1, 1),
            (1, 1, 1, 4),
            ("sequence",),
            "which sequence uses in every layer: mesh.sequence at most 2 stays",
        ),
        ((0, 0, 1, 1), (1, 2, 1, 2), ("fsdp",), "mesh: fsdp across 2 machines, joined by a slower network"),
        ((0, 0, 0, 1), (4, 1, 1), ("data",), "data across 2 machines"),  # of different sizes: as they are listed
    ],
)
@pytest.mark.parametrize("running", [True, False], ids=["a process each", "only compiled for"])
def test_data_crosses_the_network_between_machines_before_fsdp_and_tensor(
    machines, sizes, across, note, running, monkeypatch
):
    devices = [Fake(i, i if running else machine, machine if running else 0) for i, machine in enumerate(machines)]
    monkeypatch.setattr(jax, "process_count", lambda: len(devices) if running else 1)
    mesh = make_mesh(*sizes[:3], devices=devices, sequence=math.prod(sizes[3:]))
    assert tuple(mesh.shape[axis] for axis in ("data", "fsdp", "tensor")) == sizes[:3]
    assert {*mesh.devices.flat} == {*devices}
    assert axes_between_slices(mesh) == across
    line = slices_line(mesh)
    assert note in line if note else not line


@needs_libtpu
def test_slices_of_tpus_are_joined_along_data():
    open_topology("v5e:2x4")  # loads libtpu
    two = topologies.get_topology_desc("v5e:2x4", "tpu", chip_config_name="default", num_slices=2)
    mesh = make_mesh(2, 4, 2, devices=two.devices)
    assert axes_between_slices(mesh) == ("data",)
    assert slices_line(mesh) == "mesh: data across 2 slices, joined by a slower network"
