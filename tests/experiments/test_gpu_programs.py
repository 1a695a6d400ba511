import re
from unittest import mock

import pytest

from experiments.checks.gpu_programs import CASES, DTYPES, MESHES, PROGRAMS, Cell, cells, compiled, outcome
from jformer.errors import UserError
from tests.tools.forecast.test_topology import needs_cuda_compiler

SAMPLE = cells([*CASES], [*PROGRAMS], DTYPES, MESHES, sample=6)


def test_every_case_has_the_programs_of_its_task():
    found = {case: {cell.program for cell in cells([case], [*PROGRAMS], DTYPES, MESHES)} for case in CASES}
    assert found["base"] == {*PROGRAMS}
    assert found["ensemble"] == {*PROGRAMS} - {"update"}
    assert found["r_drop"] == found["packed"] == {"update"}
    assert found["bert classify"] == {"update", "greedy"}
    assert len(set(SAMPLE)) == 6


def test_a_program_that_does_not_compile_is_a_line_of_the_table(monkeypatch):
    for error, line in (
        (UserError("no such program"), ("refused", "no such program")),
        (ValueError("no such\nprogram"), ("failed", "ValueError: no such program")),
    ):
        monkeypatch.setattr("experiments.checks.gpu_programs.compiled", mock.Mock(side_effect=error))
        assert outcome(SAMPLE[0], "h100")[:2] == line


@needs_cuda_compiler
def test_bfloat16_on_eight_gpus_takes_cudnns_attention_without_a_mask():
    figures = compiled(Cell("base", "update", "bfloat16", "2x2x2"))
    called = [each.attributes for part in figures.program.computations.values() for each in part.values()]
    assert any("__cudnn$fmhaSoftmax" in attributes for attributes in called)
    assert not any("__cudnn$fmhaScaleBias" in attributes for attributes in called)
    assert {each.axes for each in figures.collectives} >= {("data",), ("fsdp",), ("tensor",)}


@needs_cuda_compiler
@pytest.mark.parametrize(("case", "precision"), [("base", "DEFAULT"), ("highest", "HIGHEST")])
def test_no_float32_product_is_tf32_at_the_highest_precision(case, precision):
    figures = compiled(Cell(case, "update", "float32", "1x1x1"))
    products = [each for part in figures.program.computations.values() for each in part.values()]
    found = [re.findall(r'"operand_precision":\["(\w+)","(\w+)"\]', each.attributes) for each in products]
    assert len(found := [pair for pairs in found for pair in pairs]) > 40
    assert set(found) == {(precision, precision)}


@pytest.mark.slow
@needs_cuda_compiler
@pytest.mark.parametrize("cell", SAMPLE, ids=" ".join)
def test_a_sample_of_all_programs_compiles(cell):
    assert compiled(cell).flops > 0
