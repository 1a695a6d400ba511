import os
import re
from importlib.util import find_spec

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jformer.errors import UserError
from jformer.main import main
from jformer.parallel.backend import compiling_for, target_of
from jformer.tools.forecast import topology
from jformer.tools.forecast.topology import (
    CHIPS,
    CUDA_PACKAGES,
    GIB,
    GPUS,
    compiler_options,
    most_even,
    open_topology,
    read_name,
)
from tests.conftest import PLATFORM

needs_libtpu = pytest.mark.skipif(not find_spec("libtpu"), reason='no libtpu here: pip install -e ".[tpu-aot]"')

needs_cuda_compiler = pytest.mark.skipif(
    bool(PLATFORM) or not any(map(find_spec, CUDA_PACKAGES)),
    reason='no compiler for absent GPUs here: pip install -e ".[gpu-aot]" and leave out JFORMER_TEST_PLATFORM',
)


def compiled_for_h100(function, *shapes):
    """Compile a function of arrays for an H100; `shapes` are trees of arrays, or of their shapes."""
    device = open_topology("h100").devices[0]
    place = SingleDeviceSharding(device)
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    with compiling_for(target_of(device)):
        lowered = jax.jit(function).lower(*arrays)
    return lowered.compile(compiler_options("gpu"))


def entry(compiled):
    """Return the text of the computation of a program that starts its kernels."""
    return compiled.as_text().partition("\nENTRY ")[2]


def written(compiled):
    """Return the types and shapes that the kernels of a program write, as text."""
    return " ".join(re.findall(r"= (.*?) (?:fusion|custom-call)\(", entry(compiled)))


@pytest.mark.parametrize(
    ("name", "family", "sizes"),
    [
        ("v5e:16x16", "v5e", (16, 16)),
        ("v5litepod-256", "v5e", (16, 16)),
        ("v5litepod-8", "v5e", (2, 4)),
        ("v6e-1", "v6e", (1, 1)),
        ("v5p:2x2x1", "v5p", (2, 2, 1)),
        ("v5p-8", "v5p", (2, 2, 1)),  # counts cores, two a chip
        ("v5p-128", "v5p", (4, 4, 4)),
        ("v4-2048", "v4", (8, 8, 16)),
        ("h100", "h100", (1, 1)),
        ("b200:8", "b200", (8, 1)),
        ("a100:4x16", "a100", (4, 16)),  # GPUs of a machine, machines
    ],
)
def test_a_slice_is_named_by_its_shape_or_by_its_type_and_gpus_by_their_number(name, family, sizes):
    assert read_name(name) == (family, sizes)


@pytest.mark.parametrize(
    "name",
    ["", "8", "-8", "v5e", "v9:2x2", "v5e:16", "v5e:16x16x1", "v5e:0x4", "v6e:32x32", "v5litepod-24", "v5p-9", "v5e:-4",
     "v6e-²"],
)  # fmt: skip
def test_other_names_are_answered_with_the_families_and_an_example(name):
    with pytest.raises(UserError, match=r"the families are v4, v5e, v5p, v6e: .*v5e:16x16"):
        open_topology(name)


@pytest.mark.parametrize("name", ["h100:0", "h100:9", "h100:", "h100:8x", "h100:8x4x2", "h100:8x1000", "h200:-1"])
def test_other_numbers_of_gpus_are_answered_with_examples(name):
    with pytest.raises(UserError, match=r"no such machine, of at most 8 GPUs: .*h100:8x4 for four such machines"):
        open_topology(name)


def test_shapes_are_as_even_as_can_be():
    assert [most_even(2**i, 2) for i in (0, 2, 3, 7)] == [(1, 1), (2, 2), (2, 4), (8, 16)]
    assert [most_even(2**i, 3) for i in (2, 3, 4, 5)] == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu-aot"), ("h100:8", "gpu-aot")])
def test_without_the_compiler_one_line_says_what_to_install(name, extra, monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf'needs .*pip install -e "\.\[{extra}\]"$'):
        open_topology(name)


@pytest.mark.parametrize(("given", "share"), [("", 0.75), ("0.9", 0.9), ("1", 1.0)])
def test_jax_takes_the_share_of_a_gpus_memory_that_its_variable_names(given, share, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given)
    assert topology.Topology("h100", GPUS["h100"], []).memory == share * GPUS["h100"].hbm


@pytest.mark.parametrize("given", ["most", "0", "1.5"])
def test_a_share_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", given)
    with pytest.raises(UserError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION='{given}' must be a share"):
        topology.memory_share()


@needs_cuda_compiler
@pytest.mark.parametrize("kind", GPUS)
def test_gpus_lie_on_machines(kind):
    found = open_topology(f"{kind}:4x2")
    assert (len(found.devices), found.devices[0].platform, found.unit) == (8, "gpu", "GPU")
    assert [device.process_index for device in found.devices] == [0] * 4 + [1] * 4
    assert 300e12 < found.peak == 2 * found.peak_in("float32") < 3e15
    assert 15e12 < found.peak_in("float32", "highest") < 80e12
    size = f"{found.chip.hbm / GIB:.0f} GiB each, of which JAX takes 75%"
    assert str(found) == f"GPUs: 8 x {found.devices[0].device_kind} on 2 machines, {size}"


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chips"), [("v4:2x2x1", 4), ("v5e:16x16", 256), ("v5p:8x8x16", 1_024), ("v6e:4x8", 32)]
)
def test_a_slice_has_a_device_for_each_chip(name, chips):
    found = open_topology(name)
    assert (found.name, len(found.devices), found.devices[0].platform) == (name, chips, "tpu")
    assert found.chip == CHIPS[name.split(":")[0]]
    assert 100e12 < found.peak < 1e15


@needs_libtpu
def test_a_shape_that_hosts_cannot_make_up_is_refused():
    with pytest.raises(UserError, match=r"--topology=v5e:3x3: no such slice, says libtpu: .*divisible"):
        open_topology("v5e:3x3")


@needs_libtpu
def test_libtpu_may_be_in_use_elsewhere():
    open_topology("v5e:2x2")
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_a_slice_that_there_is_not_is_a_mistake_of_one_line(capsys):
    assert main(["", "--config=configs/quickstart.py", "--mode=describe", "--topology=v9:2x2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jformer: --topology=v9:2x2: no such slice; the families are v4, v5e, v5p, v6e: ")
    assert "; GPUs are a100, h100, h200, b200: " in printed.err
    assert printed.err.count("\n") == 1
