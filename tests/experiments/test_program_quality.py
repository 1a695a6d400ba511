import pytest

from experiments.faults.program_quality import Overlap, gathered_twice, ideal_traffic, overlap
from jformer.tools.forecast import cost_analysis, hlo

MESH = {"data": 2, "fsdp": 4, "tensor": 1}
OVER_FSDP = "replica_groups=[2,4]<=[8], dimensions={0}"


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(
        f"{before}\nENTRY %main (p: f32[8,8]) -> f32[8,8] {{\n  %p = f32[8,8]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def gather(name, channel, made_for):
    metadata = f'metadata={{op_name="jit(step)/{made_for}/q"}}'
    return f"%{name} = f32[32,8]{{1,0}} all-gather(%p), channel_id={channel}, {OVER_FSDP}, {metadata}"


ROOT = "ROOT %out = f32[8,8]{1,0} copy(%p)"


def test_a_parameter_is_gathered_once_in_each_pass():
    once = gather("a", 1, "jvp()"), gather("b", 2, "transpose(jvp())"), gather("c", 3, "optimizer")
    assert gathered_twice(program(*once, ROOT), MESH, 1) == []
    again = gather("d", 4, "transpose(jvp())"), gather("e", 5, "optimizer")
    assert gathered_twice(program(*once, *again, ROOT), MESH, 1) == ["jit(step)/transpose(jvp())/q"]


def test_each_unrolled_layer_gathers_a_parameter_of_the_same_name():
    unrolled = gather("a", 1, "jvp()"), gather("b", 2, "jvp()")
    assert gathered_twice(program(*unrolled, ROOT), MESH, 2) == []
    assert gathered_twice(program(*unrolled, gather("c", 3, "jvp()"), ROOT), MESH, 2) == ["jit(step)/jvp()/q"]
    in_a_loop = gather("d", 4, "jvp()/while/body"), gather("e", 5, "jvp()/while/body")
    assert gathered_twice(program(*in_a_loop, ROOT), MESH, 2) == ["jit(step)/jvp()/while/body/q"]


PRODUCT = "%y = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
START = "%collective-permute-start.1 = (f32[8,8], f32[8,8]) collective-permute-start(%p), source_target_pairs={{0,1}}"
DONE = "%collective-permute-done.1 = f32[8,8]{1,0} collective-permute-done(%collective-permute-start.1)"
REDUCE = "%sum = f32[8,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add"


def test_a_collective_is_hidden_where_a_kernel_runs_before_it_is_waited_for():
    assert overlap(program(START, PRODUCT, DONE, ROOT)) == Overlap(1, 0, 0)
    assert overlap(program(START, DONE, PRODUCT, REDUCE, ROOT)) == Overlap(0, 1, 1)
    assert overlap(program(PRODUCT, ROOT)).share == 1.0
    assert overlap(program(START, PRODUCT, DONE, REDUCE, ROOT)).share == 0.5


def test_the_ideal_moves_the_arrays_of_products_once_and_the_state_twice():
    assert ideal_traffic(program(PRODUCT, "%z = f32[8,8]{1,0} add(%y, %p)", ROOT), 1_000) == 3 * 4 * 64 + 2_000


LOOP = """
%body (state: (u32[], f32[8,8])) -> (u32[], f32[8,8]) {
  %state = (u32[], f32[8,8]{1,0}) parameter(0)
  %i = u32[] get-tuple-element(%state), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%state), index=1
  %one = u32[] constant(1)
  %j = u32[] add(%i, %one)
  %k = u32[] add(%one, %j)
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (u32[], f32[8,8]{1,0}) tuple(%k, %y)
}

%condition (state.1: (u32[], f32[8,8])) -> pred[] {
  %state.1 = (u32[], f32[8,8]{1,0}) parameter(0)
  %now = u32[] get-tuple-element(%state.1), index=0
  %limit = u32[] constant(5)
  ROOT %more = pred[] compare(%now, %limit), direction=LT
}
"""


def test_an_unrolled_loop_runs_as_often_as_its_counter_takes_steps():
    """Windows around products are so: two pieces in a body, whose counter goes from 0 to 5 by twos."""
    state = "%state.2 = (u32[], f32[8,8]{1,0}) tuple(%zero, %p)"
    loop = "%loop = (u32[], f32[8,8]{1,0}) while(%state.2), condition=%condition, body=%body"
    lines = "%zero = u32[] constant(0)", state, loop, ROOT
    assert hlo.runs(program(*lines, before=LOOP))["body"] == 3
    single = LOOP.replace("tuple(%k, %y)", "tuple(%j, %y)")
    assert hlo.runs(program(*lines, before=single))["body"] == 5
    unknown = LOOP.replace("tuple(%k, %y)", "tuple(%i, %y)")
    assert hlo.runs(program(*lines, before=unknown))["body"] == 5


SPARSECORE = """
%called (table: f32[500,8], rows: s32[2]) -> f32[2,8] {
  %table = f32[500,8]{1,0} parameter(0)
  %rows = s32[2]{0} parameter(1)
  ROOT %gather = f32[2,8]{1,0} gather(%table, %rows), offset_dims={1}, slice_sizes={1,8}
}
"""


def test_a_core_beside_gathers_the_rows_that_it_needs_not_the_table():
    arrays = "(f32[500,8]{1,0}, s32[2]{0}), f32[2,8]{1,0}"
    lines = (
        "%table.1 = f32[500,8]{1,0} parameter(1)",
        "%rows.1 = s32[2]{0} parameter(2)",
        '%start = ((), (), (s32[1]{0})) call-start(), async_execution_thread="sparsecore", to_apply=%called',
        f"%update = ({arrays}) call-update(%start, %table.1, %rows.1)",
        "%done = f32[2,8]{1,0} call-done(%update)",
    )
    copied, gathered = 2 * 4 * 8 * 8, 2 * 4 * 2 * 8
    assert cost_analysis.traffic(program(*lines, ROOT, before=SPARSECORE)) == copied + gathered


SCATTER = """
%inner (sums: f32[500,8], rows: s32[2], new: f32[2,8]) -> f32[500,8] {
  %sums = f32[500,8]{1,0} parameter(0)
  %rows = s32[2]{0} parameter(1)
  %new = f32[2,8]{1,0} parameter(2)
  ROOT %scatter = f32[500,8]{1,0} scatter(%sums, %rows, %new), update_window_dims={1}, to_apply=%add
}

%outer (sums.1: f32[500,8], rows.1: s32[2], new.1: f32[2,8]) -> f32[500,8] {
  %sums.1 = f32[500,8]{1,0} parameter(0)
  %rows.1 = s32[2]{0} parameter(1)
  %new.1 = f32[2,8]{1,0} parameter(2)
  ROOT %nested = f32[500,8]{1,0} fusion(%sums.1, %rows.1, %new.1), kind=kCustom, calls=%inner
}
"""


@pytest.mark.parametrize("instruction", ["scatter({})", "fusion({}), kind=kCustom, calls=%outer"])
def test_a_scatter_reads_and_writes_the_rows_that_it_adds_to(instruction):
    lines = (
        "%sums.2 = f32[500,8]{1,0} parameter(1)",
        "%rows.2 = s32[2]{0} parameter(2)",
        "%new.2 = f32[2,8]{1,0} parameter(3)",
        f"%sum = f32[500,8]{{1,0}} {instruction.format('%sums.2, %rows.2, %new.2')}",
    )
    copied, rows, places = 2 * 4 * 8 * 8, 4 * 2 * 8, 4 * 2
    assert cost_analysis.traffic(program(*lines, ROOT, before=SCATTER)) == copied + 3 * rows + places


def splash(kind, causal, positions_last=True, memory=""):
    array, side = f"bf16[2,3,1024,64]{{3,2,1,0{memory}}}", "f32[2,3,8,1024]{3,2,1,0}"
    taken = f"bf16[2,3,{'64,1024' if positions_last else '1024,64'}]{{3,2,1,0}}"
    output = array if kind == "fwd" else f"(bf16[2,2,3,1024,64]{{4,3,2,1,0}}, {array}, {array})"
    positions = ", %positions" if causal else ""
    return program(
        *(f"%{name} = {taken} parameter({i})" for i, name in enumerate("qkv", 1)),
        f"%lse = {side} parameter(4)",
        "%positions = s32[1024,128]{1,0} parameter(5)",
        f"%splash_mha_{kind}_no_residuals.1 = {output} custom-call(%q, %k, %v, %lse"
        f'{positions}), custom_call_target="tpu_custom_call"',
        ROOT,
    )


def test_products_and_bytes_of_splash_attention_follow_from_its_blocks():
    """1,024 positions are two blocks of 512 a side; a causal mask leaves one of the four out.

    Backward, each block of keys writes its share of the gradient of the queries.
    """
    pairs, array = 2 * 3 * 1_024 * 1_024, 2 * 2 * 3 * 1_024 * 64
    assert cost_analysis.flops(splash("fwd", causal=False)) == 2 * 2 * pairs * 64
    assert cost_analysis.flops(splash("dkv", causal=True)) == 2 * 5 * pairs * 64 * 3 / 4
    assert cost_analysis.flops(splash("dkv", causal=True, positions_last=False)) == 2 * 5 * pairs * 64 * 3 / 4
    assert cost_analysis.flops(splash("dkv", causal=True), once=True) == 2 * 4 * pairs * 64
    side, copied = 4 * 2 * 3 * 8 * 1_024, 2 * 4 * 8 * 8  # the copy at the end moves its own
    assert cost_analysis.traffic(splash("fwd", causal=False)) == copied + 2 * array + 2 * array * 2 + side
    beside = splash("fwd", causal=False, memory=":S(1)")  # its output stays beside the cores
    assert cost_analysis.traffic(beside) == copied + array + 2 * array * 2 + side
    assert cost_analysis.traffic(splash("dkv", causal=False)) == copied + 6 * array + 2 * (array + side)
    assert (
        cost_analysis.traffic(splash("fwd", causal=True))
        == copied + 2 * array + 2 * array * 1.5 + side + 4 * 1_024 * 128
    )
