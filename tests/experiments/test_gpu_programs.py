import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import Partial

from experiments.checks.gpu_programs import CASES, DTYPES, MESHES, PROGRAMS, Cell, cells, compiled, outcomes, tables
from jformer.errors import UserError
from jformer.models.layers.dot_product import attend
from tests.tools.forecast.test_topology import compiled_for_h100, entry, needs_cuda_compiler


@pytest.fixture(scope="module")
def sample():
    return cells([*CASES], [*PROGRAMS], DTYPES, MESHES, sample=6)


def test_every_case_has_the_programs_of_its_task(sample):
    found = {case: {cell.program for cell in cells([case], [*PROGRAMS], DTYPES, MESHES)} for case in CASES}
    assert found["base"] == {*PROGRAMS}
    assert found["ensemble"] == {*PROGRAMS} - {"update"}
    assert found["r_drop"] == found["packed"] == {"update"}
    assert found["bert classify"] == {"update", "greedy"}
    assert len(set(sample)) == 6


@pytest.mark.slow
def test_cells_are_kept_in_a_file_and_what_it_lacks_is_compiled(monkeypatch, tmp_path, sample):
    asked, first, second, third = [], *sample[:3]
    found = {first: RuntimeError("no such\nprogram"), second: UserError("not this mesh")}

    def compile_it(cell, kind):
        asked.append(cell)
        raise found[cell]

    monkeypatch.setattr("experiments.checks.gpu_programs.compiled", compile_it)
    for number in (1, 2):
        results = outcomes([first, second][:number], "h100", tmp_path / "cells", math.inf)
    assert asked == [first, second]
    assert [result[:2] for result in results.values()] == [
        ("failed", "RuntimeError: no such program"),
        ("refused", "not this mesh"),
    ]
    assert outcomes([first, third], "h100", tmp_path / "cells", end=-math.inf).keys() == {first}
    assert not outcomes([first, third], "a100", tmp_path / "cells", end=-math.inf)
    lines = [*tables(results, MESHES)]
    assert f"{' '.join(first)}: RuntimeError: no such program" in lines
    assert sum(line.count("0 / 0 / 1") + line.count("0 / 1 / 0") for line in lines) == 2


def test_a_cell_at_which_the_process_ended_is_a_failure(monkeypatch, tmp_path, sample):
    def abort(cell, kind):
        raise SystemExit

    monkeypatch.setattr("experiments.checks.gpu_programs.compiled", abort)
    with pytest.raises(SystemExit):
        outcomes(sample[:1], "h100", tmp_path / "cells", math.inf)
    (result,) = outcomes(sample[:1], "h100", tmp_path / "cells", math.inf).values()
    assert result[:2] == ("failed", "the process ended")


@needs_cuda_compiler
def test_bfloat16_on_eight_gpus_takes_cudnns_attention_without_a_mask():
    figures = compiled(Cell("base", "update", "bfloat16", "2x2x2"))
    called = [each.attributes for part in figures.program.values() for each in part.values()]
    assert any("__cudnn$fmhaSoftmax" in attributes for attributes in called)
    assert not any("__cudnn$fmhaScaleBias" in attributes for attributes in called)
    assert {each.axes for each in figures.collectives} >= {("data",), ("fsdp",), ("tensor",)}


@pytest.mark.slow
@needs_cuda_compiler
def test_no_kernel_of_attention_with_dropout_writes_scores_in_float32():
    q, kept = jax.ShapeDtypeStruct((8, 512, 16, 64), "bfloat16"), jax.ShapeDtypeStruct((8, 16, 512, 512), "bool")

    def only(kept, weights, first):
        return jnp.where(kept, weights / 0.9, 0.0)

    def gradients(q, k, v, kept, g):
        def values(q, k, v):
            return attend(q, {"k": k, "v": v}, None, drop_weights=Partial(only, kept))[0]

        return jax.vjp(values, q, k, v)[1](g)

    kernels = entry(compiled_for_h100(gradients, q, q, q, kept, q))
    assert "bf16[8,16,512,512]" in kernels
    assert "f32[8,16,512,512]" not in kernels


@needs_cuda_compiler
@pytest.mark.parametrize(
    ("case", "precision"), [pytest.param("base", "DEFAULT", marks=pytest.mark.slow), ("highest", "HIGHEST")]
)
def test_no_float32_product_is_tf32_at_the_highest_precision(case, precision):
    figures = compiled(Cell(case, "update", "float32", "1x1x1"))
    products = [each for part in figures.program.values() for each in part.values()]
    found = [re.findall(r'"operand_precision":\["(\w+)","(\w+)"\]', each.attributes) for each in products]
    assert len(found := [pair for pairs in found for pair in pairs]) > 40
    assert set(found) == {(precision, precision)}


@pytest.mark.slow
@needs_cuda_compiler
@pytest.mark.parametrize("number", range(6))
def test_a_sample_of_all_programs_compiles(number, sample):
    cell = sample[number]
    assert compiled(cell).flops > 0
