import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jformer import hlo

LOOP = """HloModule loop, is_scheduled=true

%fused (p.0: f32[6,8,4], p.1: s32[]) -> f32[8,4] {
  %p.0 = f32[6,8,4]{2,1,0:T(8,128)} parameter(0)
  %p.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %part = f32[1,8,4]{2,1,0:T(8,128)} dynamic-slice(%p.0, %p.1, %zero, %zero), dynamic_slice_sizes={1,8,4}
}

%body (state: (s32[], bf16[1,16,8], f32[6,8,4])) -> (s32[], bf16[1,16,8], f32[6,8,4]) {
  %state = (s32[]{:T(128)}, bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)}, f32[6,8,4]{2,1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state), index=1
  %ws = f32[6,8,4]{2,1,0:T(8,128)} get-tuple-element(%state), index=2
  %w = f32[1,8,4]{2,1,0:T(8,128)} fusion(%ws, %i), kind=kLoop, calls=%fused, metadata={op_name="a, b/while"}
  %y = f32[1,16,4]{2,1,0:T(8,128)S(1)} convolution(%x, %w), window={size=1}, dim_labels=0bf_0io->0bf
  ROOT %next = (s32[]{:T(128)}, bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)}, f32[6,8,4]{2,1,0:T(8,128)}) tuple(%i, %x, %ws)
}

%condition (state.1: (s32[], bf16[1,16,8], f32[6,8,4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(6)
  %state.1 = (s32[]{:T(128)}, bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)}, f32[6,8,4]{2,1,0:T(8,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (x: bf16[1,16,8], ws: f32[6,8,4]) -> f32[6,8,4] {
  %x.1 = bf16[1,16,8]{2,1,0:T(8,128)(2,1)} parameter(0)
  %ws.1 = f32[6,8,4]{2,1,0:T(8,128)} parameter(1)
  %zero.1 = s32[]{:T(128)} constant(0)
  %copy = bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)} copy(%x.1)
  %start = (s32[]{:T(128)}, bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)}, f32[6,8,4]{2,1,0:T(8,128)}) tuple(%zero.1, %copy, %ws.1)
  %while = (s32[]{:T(128)}, bf16[1,16,8]{2,1,0:T(8,128)(2,1)S(1)}, f32[6,8,4]{2,1,0:T(8,128)}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[6,8,4]{2,1,0:T(8,128)} get-tuple-element(%while), index=2
}
"""  # noqa: E501


def test_a_program_of_a_tpu_is_read_line_by_line():
    program = hlo.parse(LOOP)
    assert list(program.computations) == ["fused", "body", "condition", "main"]
    loop = program.computations["main"]["while"]
    assert (loop.opcode, loop.operands, loop.calls) == ("while", ("start",), ["condition", "body"])
    assert [(leaf.dtype, leaf.dims, leaf.fast) for leaf in loop.leaves] == [
        ("s32", (), False),
        ("bf16", (1, 16, 8), True),
        ("f32", (6, 8, 4), False),
    ]
    assert program.computations["body"]["y"].attribute("dim_labels") == "0bf_0io->0bf"


def test_a_loop_runs_as_often_as_its_condition_allows():
    program = hlo.parse(LOOP)
    assert hlo.runs(program) == {"main": 1, "condition": 6, "body": 6, "fused": 6}
    assert hlo.runs(program, kernels=False) == {"main": 1, "condition": 6, "body": 6}
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert hlo.runs(hlo.parse(known))["fused"] == 5


def test_products_in_a_loop_count_every_time():
    assert hlo.flops(hlo.parse(LOOP)) == 6 * 2 * 16 * 8 * 4


def test_traffic_is_what_leaves_or_enters_hbm():
    read_and_written = 2 * 8 * 4 * 4  # a slice of the stack by the fusion, not all of it
    read_again = 8 * 4 * 4  # by the product, whose other input and output are beside the cores
    compared = 4  # the counter, with a limit that is a constant in HBM
    assert hlo.traffic(hlo.parse(LOOP)) == 16 * 8 * 2 + 6 * (read_and_written + 4 + read_again + 2 * compared + 1)


@pytest.mark.parametrize(
    ("line", "products"),
    [
        # A product of batches [32 8] as XLA:TPU spells it: their axes are spatial, the input spread so that none meet.
        (("bf16[32,8,256,64]", "bf16[32,8,64,16]", "f32[32,8,256,16]",
          "window={size=32x8 stride=31x7 lhs_dilate=32x8}, dim_labels=01bf_01io->01bf"), 32 * 8 * 256 * 64 * 16),
        # Heads [8] of the output made an axis that pads the input.
        (("bf16[4,10,64,1]", "bf16[8,16,64,1]", "bf16[4,10,8,16]",
          "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f"), 4 * 10 * 64 * 8 * 16),
        # A sum over the rows of a batch: its axis slides over all of the input at once.
        (("bf16[32,256,512]", "bf16[32,256,64]", "bf16[512,64,1]", "window={size=32}, dim_labels=0fb_0io->bf0"),
         32 * 256 * 512 * 64),
    ],
)  # fmt: skip
def test_products_hide_in_convolutions(line, products):
    left, right, out, attributes = line
    text = f"""
ENTRY %main (l: {left}, r: {right}) -> {out} {{
  %l = {left}{{0}} parameter(0)
  %r = {right}{{0}} parameter(1)
  ROOT %y = {out}{{0}} convolution(%l, %r), {attributes}
}}
"""
    assert hlo.flops(hlo.parse(text)) == 2 * products


def stacked(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def test_a_scan_compiled_here_counts_all_its_iterations():
    x, ws = jnp.ones((16, 32)), jnp.ones((7, 32, 32))
    compiled = jax.jit(stacked).lower(x, ws).compile()
    assert hlo.flops(hlo.parse(compiled.as_text())) == 7 * 2 * 16 * 32 * 32
    assert compiled.cost_analysis()["flops"] < 2 * 2 * 16 * 32 * 32  # which is why XLA's own count is not taken


def test_a_search_counts_up_to_its_limit():
    def search(x):
        return lax.while_loop(lambda s: (s[0] < 11) & (s[1].sum() < 9.0), lambda s: (s[0] + 1, s[1] @ s[1]), (0, x))

    program = hlo.parse(jax.jit(search).lower(jnp.ones((8, 8))).compile().as_text())
    assert hlo.flops(program) == 11 * 2 * 8**3


def test_a_kernel_reads_its_inputs_and_writes_its_outputs_once():
    x = np.ones((64, 32), np.float32)
    program = hlo.parse(jax.jit(lambda x, y: x * y + 1).lower(x, x).compile().as_text())
    assert hlo.traffic(program) == 3 * x.nbytes
