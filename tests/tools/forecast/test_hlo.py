from jformer.tools.forecast import hlo

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
    assert list(program) == ["fused", "body", "condition", "main"]
    loop = program["main"]["while"]
    assert (loop.opcode, loop.operands, loop.calls) == ("while", ("start",), ["condition", "body"])
    assert loop.leaves == [
        ("s32", (), False, ()),
        ("bf16", (1, 16, 8), True, (1, 16, 128)),
        ("f32", (6, 8, 4), False, (6, 8, 128)),
    ]
    assert [(leaf.bytes, leaf.stored) for leaf in loop.leaves] == [(4, 4), (256, 4_096), (768, 24_576)]
    assert hlo.leaves("bf16[5,3,9]{0,2,1:T(8,128)(2,1)}")[0].padded == (128, 3, 16)  # the first axis is last in memory
    assert hlo.leaves("f32[300]{0:T(256)}")[0].padded == (512,)
    assert program["body"]["y"].attribute("dim_labels") == "0bf_0io->0bf"


def test_a_loop_runs_as_often_as_its_condition_allows():
    program = hlo.parse(LOOP)
    assert hlo.runs(program) == {"main": 1, "condition": 6, "body": 6, "fused": 6}
    assert hlo.runs(program, kernels=False) == {"main": 1, "condition": 6, "body": 6}
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert hlo.runs(hlo.parse(known))["fused"] == 5
