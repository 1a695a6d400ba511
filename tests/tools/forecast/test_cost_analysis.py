import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jformer.tools.forecast.cost_analysis import REMAT, flops, kernels, largest_kernels, traffic
from jformer.tools.forecast.hlo import parse
from tests.tools.forecast.test_hlo import LOOP


def test_products_in_a_loop_count_every_time():
    assert flops(parse(LOOP)) == 6 * 2 * 16 * 8 * 4
    assert kernels(parse(LOOP)) == 1 + 6 * 3  # a copy; a fusion, a product and a comparison


def test_traffic_is_what_leaves_or_enters_hbm():
    """In whole tiles of a TPU, whose last axis is 128."""
    read_and_written = 2 * 8 * 128 * 4  # a slice of the stack by the fusion, not all of it
    read_again = 8 * 128 * 4  # by the product, whose other input and output are beside the cores
    compared = 4  # the counter, with a limit that is a constant in HBM
    assert traffic(parse(LOOP)) == 16 * 128 * 2 + 6 * (read_and_written + 4 + read_again + 2 * compared + 1)
    assert [(each.bytes, each.times) for each in largest_kernels(parse(LOOP))] == [
        (6 * (read_and_written + 4), 6), (6 * read_again, 6), (16 * 128 * 2, 1), (6 * (2 * compared + 1), 6),
    ]  # fmt: skip


NESTED = """
%slice_of (a: f32[8,4], i: s32[]) -> f32[1,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,4}
}

%around (b: f32[8,4], j: s32[]) -> f32[1,4] {
  %b = f32[8,4]{1,0} parameter(0)
  %j = s32[] parameter(1)
  ROOT %t = f32[1,4]{1,0} fusion(%b, %j), kind=kLoop, calls=%slice_of
}

ENTRY %main (x: f32[8,4], k: s32[]) -> f32[1,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %y = f32[1,4]{1,0} fusion(%x, %k), kind=kLoop, calls=%around
}
"""


def test_a_fusion_in_a_fusion_reads_the_slice_that_it_takes():
    assert traffic(parse(NESTED)) == 4 * 4 + 4 + 4 * 4  # the slice, the index, the result


# As XLA:TPU has it: a nested fusion may only give an array another shape or layout, and what is then sliced is a slice.
LAYOUTS = """
%shaped (a: f32[8,4]) -> f32[32] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %r = f32[32]{0} bitcast(%a)
}

%laid_out (b: f32[9,32]) -> f32[9,32] {
  %b = f32[9,32]{1,0} parameter(0)
  ROOT %l = f32[9,32]{0,1} copy(%b)
}

%sum (c: f32[8,4], d: f32[9,32], i: s32[]) -> f32[32] {
  %c = f32[8,4]{1,0} parameter(0)
  %e = f32[32]{0} fusion(%c), kind=kLoop, calls=%shaped
  %d = f32[9,32]{1,0} parameter(1)
  %f = f32[9,32]{0,1} fusion(%d), kind=kLoop, calls=%laid_out
  %i = s32[] parameter(2)
  %s = f32[1,32]{0,1} dynamic-slice(%f, %i, %i), dynamic_slice_sizes={1,32}
  %t = f32[32]{0} bitcast(%s)
  ROOT %u = f32[32]{0} add(%e, %t)
}

ENTRY %main (x: f32[8,4], k: s32[]) -> f32[32] {
  %x = f32[8,4]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %stack = f32[9,32]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %y = f32[32]{0} fusion(%x, %stack, %k), kind=kLoop, calls=%sum
}
"""


def test_layouts_inside_a_fusion_move_nothing_and_memory_is_allocated_unwritten():
    assert traffic(parse(LAYOUTS)) == 3 * 32 * 4 + 4  # two that are added, the sum, the index
    assert kernels(parse(LAYOUTS)) == 1


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
    assert flops(parse(text)) == 2 * products


def stacked(x, ws):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def test_a_scan_compiled_here_counts_all_its_iterations():
    x, ws = jnp.ones((16, 32)), jnp.ones((7, 32, 32))
    compiled = jax.jit(stacked).lower(x, ws).compile()
    assert flops(parse(compiled.as_text())) == 7 * 2 * 16 * 32 * 32
    assert compiled.cost_analysis()["flops"] < 2 * 2 * 16 * 32 * 32  # which is why XLA's own count is not taken


def test_a_search_counts_up_to_its_limit():
    def search(x):
        return lax.while_loop(lambda s: (s[0] < 11) & (s[1].sum() < 9.0), lambda s: (s[0] + 1, s[1] @ s[1]), (0, x))

    program = parse(jax.jit(search).lower(jnp.ones((8, 8))).compile().as_text())
    assert flops(program) == 11 * 2 * 8**3


def test_a_kernel_reads_its_inputs_and_writes_its_outputs_once():
    x = np.ones((64, 32), np.float32)
    program = parse(jax.jit(lambda x, y: x * y + 1).lower(x, x).compile().as_text())
    assert traffic(program) == 3 * x.nbytes


# Programs for GPUs: a product of one layer's slice, with a workspace; a slice copied asynchronously; attention.
GPU_CALLS = """
%sliced_product (a: f32[8,16,4], i: s32[], b: f32[4,2]) -> (f32[16,2], s8[33554432]) {
  %a = f32[8,16,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,16,4]{2,1,0} dynamic-slice(%a, %i, %i, %i), dynamic_slice_sizes={1,16,4}
  %c = f32[16,4]{1,0} bitcast(%s)
  %b = f32[4,2]{1,0} parameter(2)
  ROOT %p = (f32[16,2]{1,0}, s8[33554432]{0}) custom-call(%c, %b), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}

%slice (a.1: f32[8,16,4], i.1: s32[]) -> f32[1,16,4] {
  %a.1 = f32[8,16,4]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %s.1 = f32[1,16,4]{2,1,0} dynamic-slice(%a.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={1,16,4}
}

ENTRY %main (x: f32[8,16,4], k: s32[], w: f32[4,2], q: bf16[3,32,2,8]) -> f32[16,2] {
  %x = f32[8,16,4]{2,1,0} parameter(0)
  %k = s32[] parameter(1)
  %w = f32[4,2]{1,0} parameter(2)
  %q = bf16[3,32,2,8]{3,2,1,0} parameter(3)
  FIRST
}
"""
PRODUCT = "ROOT %y = (f32[16,2]{1,0}, s8[33554432]{0}) fusion(%x, %k, %w), kind=kCustom, calls=%sliced_product"
START = "%z = ((f32[8,16,4], s32[]), f32[1,16,4], u32[]) fusion-start(%x, %k), kind=kLoop, calls=%slice"
FAST_START = START.replace("), f32[1,16,4]", "), f32[1,16,4]{2,1,0:S(1)}")  # its output stays in on-chip memory
DONE = "  ROOT %d = f32[1,16,4] fusion-done(%z)"
SLICE = "ROOT %v = ((f32[8,16,4]), f32[2,16,4]{2,1,0}, s32[]) slice-start(%x), slice={[0:2], [0:16], [0:4]}"
COPY = "ROOT %v = (f32[8,16,4]{2,1,0}, f32[8,16,4]{2,1,0}, u32[]) copy-start(%x)"
FORWARD = """ROOT %o = (bf16[3,2,32,8], f32[3,2,32], u8[0]) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": \
{"element_type": "BF16", "dimensions": ["3", "2", "32", "32"], "tuple_shapes": []}, "mask_type": "NO_MASK"}}"""
BACKWARD = FORWARD.replace("fmhaSoftmax", "fmhaSoftmaxBackward")
ATTENDED, Q_BYTES = 2 * 3 * 2 * 32 * 32 * 8, 3 * 32 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("line", "products", "once", "moved"),
    [
        (PRODUCT, 2 * 16 * 4 * 2, 2 * 16 * 4 * 2, 4 * (16 * 4 + 4 * 2 + 16 * 2) + 4),
        (f"{START}\n{DONE}", 0, 0, 2 * 4 * 16 * 4 + 4),
        (f"{FAST_START}\n{DONE}", 0, 0, 4 * 16 * 4 + 4),
        (SLICE, 0, 0, 2 * 4 * 2 * 16 * 4),
        (SLICE.replace("{2,1,0}", "{2,1,0:S(1)}"), 0, 0, 4 * 2 * 16 * 4),
        (COPY, 0, 0, 2 * 4 * 8 * 16 * 4),
        (COPY.replace("{2,1,0}", "{2,1,0:S(1)}", 1), 0, 0, 4 * 8 * 16 * 4),
        (FORWARD, 2 * ATTENDED, 2 * ATTENDED, 4 * Q_BYTES + 4 * 3 * 2 * 32),
        (BACKWARD, 5 * ATTENDED, 4 * ATTENDED, 4 * Q_BYTES + 4 * 3 * 2 * 32),
        (FORWARD.replace("NO_MASK", "CAUSAL"), 2 * ATTENDED * 33 // 64, 2 * ATTENDED, 4 * Q_BYTES + 4 * 3 * 2 * 32),
        (
            FORWARD.replace('"NO_MASK"', '"CAUSAL", "sliding_window_length": 4'),
            2 * ATTENDED * (1 + 2 + 3 + 29 * 4) // 32**2,
            2 * ATTENDED,
            4 * Q_BYTES + 4 * 3 * 2 * 32,
        ),
        (f'{FORWARD}, metadata={{op_name="jit(f)/{REMAT}/attn"}}', 2 * ATTENDED, 0, 4 * Q_BYTES + 4 * 3 * 2 * 32),
    ],
    ids=[
        "product",
        "slice",
        "slice into the core",
        "slice-start",
        "slice-start into the core",
        "copy",
        "copy into the core",
        "forward",
        "backward",
        "causal",
        "in a window",
        "repeated",
    ],
)
def test_calls_of_nvidias_libraries_count_their_products_and_slices(line, products, once, moved):
    program = parse(GPU_CALLS.replace("FIRST", line).replace("\\\n", ""))
    assert (flops(program), flops(program, once=True), traffic(program)) == (products, once, moved)


@pytest.mark.parametrize(
    ("name", "keys", "share", "products", "once"),
    [("fwd", 256, 1, 2, 2), ("bwd", 256, 1, 5, 4), ("causal_bwd", 256, 1, 5, 4), ("causal_fwd", 512, 5 / 8, 2, 2)],
)
def test_our_kernel_for_tpus_counts_the_products_of_its_stages(name, keys, share, products, once):
    """Of the pairs of a causal row of four stages it computes 1/4 · (1/4 + 2/4 + 3/4 + 1)."""
    line = (
        f"ROOT %jvp_row_attention_{name}_.1 = bf16[3,2,8,512]{{3,2,1,0:T(8,128)(2,1)}} custom-call(%q, %k, %k), "
        'custom_call_target="tpu_custom_call"'
    )
    text = GPU_CALLS.replace("FIRST", line).replace("%q = bf16[3,32,2,8]", "%q = bf16[3,2,8,512]")
    program = parse(text.replace("%k = s32[]", f"%k = bf16[3,2,8,{keys}]{{3,2,1,0:T(8,128)(2,1)}}"))
    pairs = 2 * 3 * 2 * 512 * keys * 8
    assert (flops(program), flops(program, once=True)) == (share * products * pairs, once * pairs)
    assert traffic(program) == 2 * 3 * 2 * 8 * (2 * 512 + 2 * keys)


def test_what_a_backward_pass_repeats_is_not_counted_again():
    def loss(w, x, policy):
        layer = jax.checkpoint(lambda x, _: (jnp.sin(x @ w), None), policy=policy)
        return lax.scan(layer, x, length=5)[0].sum()

    x = jnp.ones((8, 8))
    kept, repeated = (
        parse(jax.jit(jax.grad(loss), static_argnums=2).lower(x, x, policy).compile().as_text())
        for policy in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable)
    )
    assert flops(repeated) > flops(kept) == flops(kept, once=True) == flops(repeated, once=True)
