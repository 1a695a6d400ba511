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


def splash(kind, causal):
    array, side = "bf16[2,3,1024,64]{3,2,1,0}", "f32[2,3,8,1024]{3,2,1,0}"
    output = array if kind == "fwd" else f"(bf16[2,2,3,1024,64]{{4,3,2,1,0}}, {array}, {array})"
    positions = ", %positions" if causal else ""
    return program(
        *(f"%{name} = {array} parameter({i})" for i, name in enumerate("qkv", 1)),
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
    assert cost_analysis.flops(splash("dkv", causal=True), once=True) == 2 * 4 * pairs * 64
    side, copied = 4 * 2 * 3 * 8 * 1_024, 2 * 4 * 8 * 8  # the copy at the end moves its own
    assert cost_analysis.traffic(splash("fwd", causal=False)) == copied + 2 * array + 2 * array * 2 + side
    assert cost_analysis.traffic(splash("dkv", causal=False)) == copied + 6 * array + 2 * (array + side)
    assert (
        cost_analysis.traffic(splash("fwd", causal=True))
        == copied + 2 * array + 2 * array * 1.5 + side + 4 * 1_024 * 128
    )
