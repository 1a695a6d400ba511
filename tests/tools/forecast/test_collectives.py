import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jformer.parallel.mesh import make_mesh
from jformer.tools.forecast import hlo
from jformer.tools.forecast.collectives import Collective, Overlap, collectives, device_groups, groups_of

SIZES = {"data": 2, "fsdp": 4, "tensor": 2}


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true", [[0, 1], [2, 3]]),
        ("replica_groups=[2,4]<=[8], dimensions={0}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=3] {'a'}, to_apply=%add", [[0, 3], [1, 4], [2, 5]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups={}, to_apply=%add", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", [[0, 1], [1, 2], [2, 3], [3, 0]]),
    ],
)
def test_groups_are_read_in_every_form(attributes, groups):
    assert sorted(map(sorted, device_groups(attributes, 4).tolist())) == sorted(map(sorted, groups))


@pytest.mark.parametrize(
    ("attributes", "axes", "devices"),
    [
        ("replica_groups=[8,2]<=[16]", ("tensor",), 2),
        ("replica_groups=[4,4]<=[2,4,2]T(0,2,1)", ("fsdp",), 4),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=8] {'axis_0'}", ("data",), 2),
        ("replica_groups=[2,8]<=[8,2]T(1,0)", ("data", "fsdp"), 8),
        ("source_target_pairs={{0,2},{2,4},{4,6}}", ("fsdp",), 2),
    ],
)
def test_axes_are_those_along_which_the_devices_of_a_group_differ(attributes, axes, devices):
    instruction = hlo.Instruction("x", "f32[2]", "all-reduce", ("y",), attributes, False, "%y")
    assert groups_of(instruction, SIZES) == (axes, devices)


TWO_MACHINES = [0, 0, 0, 0, 1, 1, 1, 1]
ALL, WITHIN, PAIRS = "[1,8]<=[8]", "[2,4]<=[8]", "[4,2]<=[2,4]T(1,0)"  # groups; a pair has a device of each machine


@pytest.mark.parametrize(
    ("kind", "groups", "sent", "crossing"),  # of an array of 80 bytes
    [
        ("all-reduce", WITHIN, 2 * 80 * 3 / 4, 0),
        ("all-reduce", ALL, 2 * 80 * 3 / 4, 2 * 40 / 4),  # of the half that the other machine sums; four cards share it
        ("all-reduce", PAIRS, 0, 2 * 40),
        ("all-to-all", ALL, 80 * 3 / 8, 40),
        ("all-to-all", WITHIN, 80 * 3 / 4, 0),
        ("collective-permute", "{{0,1},{1,0}}", 80, 0),
        ("collective-permute", "{{0,4},{4,0}}", 0, 80),
    ],
)
def test_what_leaves_a_machine_is_shared_by_its_devices(kind, groups, sent, crossing):
    attribute = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    text = f"""
ENTRY %main (x: f32[20]) -> f32[20] {{
  %x = f32[20] parameter(0)
  ROOT %y = f32[20] {kind}(%x), {attribute}={groups}, to_apply=%add
}}
"""
    (found,) = collectives(hlo.parse(text), {"data": 2, "fsdp": 4}, np.array(TWO_MACHINES))
    assert (found.sent, found.crossing) == (sent, crossing)


ASYNC = """
%start.1 (p: bf16[4,256]) -> bf16[16,256] {
  %p = bf16[4,256]{1,0} parameter(0)
  %all-gather.1 = bf16[16,256]{1,0} all-gather(%p), channel_id=7, replica_groups=[4,4]<=[16], dimensions={0}
  ROOT %go = (bf16[4,256]{1,0}, bf16[16,256]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done.1 (p.1: bf16[4,256]) -> bf16[16,256] {
  %p.1 = bf16[4,256]{1,0} parameter(0)
  %all-gather.2 = bf16[16,256]{1,0} all-gather(%p.1), channel_id=7, replica_groups=[4,4]<=[16], dimensions={0}
  ROOT %end = bf16[16,256]{1,0} custom-call(%p.1, %all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.1 (p.2: f32[16,256]) -> f32[4,256] {
  %p.2 = f32[16,256]{1,0} parameter(0)
  %all-reduce.1 = f32[16,256]{1,0} all-reduce(%p.2), channel_id=8, replica_groups=[4,4]<=[16], to_apply=%add
  %at = s32[] constant(0)
  ROOT %own = f32[4,256]{1,0} dynamic-slice(%all-reduce.1, %at, %at), dynamic_slice_sizes={4,256}
}

ENTRY %main (a: bf16[4,256], b: f32[16,256]) -> f32[4,256] {
  %a = bf16[4,256]{1,0} parameter(0)
  %b = f32[16,256]{1,0} parameter(1)
  %fusion.1 = (bf16[4,256]{1,0}, bf16[16,256]{1,0}) fusion(%a), kind=kCustom, calls=%start.1
  %fusion.2 = bf16[16,256]{1,0} fusion(%fusion.1), kind=kCustom, calls=%done.1
  %send = (f32[16,256]{1,0}, f32[16,256]{1,0}, u32[], u32[]) collective-permute-start(%b), channel_id=9, source_target_pairs={{0,4},{4,8},{8,12},{12,0}}
  %sent = f32[16,256]{1,0} collective-permute-done(%send)
  ROOT %fusion.3 = f32[4,256]{1,0} fusion(%sent), kind=kCustom, calls=%all-reduce-scatter.1
}
"""  # noqa: E501


def test_what_a_tpu_hides_in_fusions_counts_once_and_by_its_name():
    found = collectives(hlo.parse(ASYNC), {"data": 4, "fsdp": 4, "tensor": 1})
    size = 16 * 256
    assert found == [
        Collective("collective-permute", ("data",), 2, 1, 4 * size),
        Collective("reduce-scatter", ("fsdp",), 4, 1, 4 * size),
        Collective("all-gather", ("fsdp",), 4, 1, 2 * size),
    ]
    assert [each.sent for each in found] == [4 * size, 3 * size, 1.5 * size]


@pytest.mark.parametrize(
    ("first", "second", "overlaps"), [("%sum", "%work", ()), ("%work", "%sum", (Overlap(32, 0, 64),))]
)
def test_a_collective_runs_beside_the_kernels_between_its_start_and_its_end(first, second, overlaps):
    lines = {
        "%work": "  %work = f32[8] negate(%x)",
        "%sum": "  %sum = f32[8] all-reduce-done(%go)",
    }
    text = f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %go = f32[8] all-reduce-start(%x), replica_groups={{{{0,1}}}}, to_apply=%add
{lines[first]}
{lines[second]}
  ROOT %y = f32[8] add(%work, %sum)
}}
"""
    (found,) = collectives(hlo.parse(text), {"data": 2})
    assert found.overlaps == overlaps


def compiled(function, mesh, in_specs, out_specs, *arrays):
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    program = hlo.parse(jax.jit(mapped).lower(*arrays).compile().as_text())
    return {each.kind: each for each in collectives(program, dict(mesh.shape))}


def test_collectives_of_a_compiled_program_with_their_axes_and_bytes():
    def body(x):
        summed = lax.psum(x, "data")
        gathered = lax.all_gather(x, "fsdp", tiled=True)
        passed = lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
        scattered = lax.psum_scatter(gathered, ("data", "tensor"), tiled=True)
        return summed.sum() + gathered.sum() + passed.sum() + scattered.sum()

    x = jnp.ones((16, 8))
    found = compiled(body, make_mesh(2, 2, 2), P(("data", "fsdp")), P(), x)
    part = x.nbytes // 4
    assert found["all-reduce"] == Collective("all-reduce", ("data",), 2, 1, part)
    assert found["all-gather"] == Collective("all-gather", ("fsdp",), 2, 1, 2 * part)
    assert found["collective-permute"] == Collective("collective-permute", ("tensor",), 2, 1, part)
    assert found["reduce-scatter"] == Collective("reduce-scatter", ("data", "tensor"), 4, 1, 2 * part)
    assert found["all-reduce"].sent == part
    assert found["reduce-scatter"].sent == 2 * part * 3 / 4


def test_collectives_in_a_loop_count_every_time():
    def body(x, ws):
        return lax.scan(lambda x, w: (lax.psum(x * w, "data") / 4, None), x, ws)[0]

    found = compiled(body, make_mesh(4), (P(), P()), P(), np.ones(32, np.float32), np.ones((5, 32), np.float32))
    assert found["all-reduce"] == Collective("all-reduce", ("data",), 4, 5, 5 * 128)
