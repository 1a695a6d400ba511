import os
from importlib.util import find_spec

import pytest

from jformer.errors import UserError
from jformer.main import main
from jformer.tools.forecast import topology
from jformer.tools.forecast.topology import CHIPS, most_even, open_slice, read_name

needs_libtpu = pytest.mark.skipif(not find_spec("libtpu"), reason='no libtpu here: pip install -e ".[tpu-aot]"')


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
    ],
)
def test_a_slice_is_named_by_its_shape_or_by_its_type(name, family, sizes):
    assert read_name(name) == (family, sizes)


@pytest.mark.parametrize(
    "name", ["", "v5e", "v9:2x2", "v5e:16", "v5e:16x16x1", "v5e:0x4", "v6e:32x32", "v5litepod-24", "v5p-9", "v5e:-4"]
)
def test_other_names_are_answered_with_the_families_and_an_example(name):
    with pytest.raises(UserError, match=r"the families are v4, v5e, v5p, v6e: .*v5e:16x16"):
        open_slice(name)


def test_shapes_are_as_even_as_can_be():
    assert [most_even(2**i, 2) for i in (0, 2, 3, 7)] == [(1, 1), (2, 2), (2, 4), (8, 16)]
    assert [most_even(2**i, 3) for i in (2, 3, 4, 5)] == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'needs libtpu.*pip install -e "\.\[tpu-aot\]"$'):
        open_slice("v5e:2x2")


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "chips"), [("v4:2x2x1", 4), ("v5e:16x16", 256), ("v5p:8x8x16", 1_024), ("v6e:4x8", 32)]
)
def test_a_slice_has_a_device_for_each_chip(name, chips):
    found = open_slice(name)
    assert (found.name, len(found.devices), found.platform) == (name, chips, "tpu")
    assert found.chip == CHIPS[name.split(":")[0]]
    assert 100e12 < found.peak < 1e15


@needs_libtpu
def test_a_shape_that_hosts_cannot_make_up_is_refused():
    with pytest.raises(UserError, match=r"--topology=v5e:3x3: no such slice, says libtpu: .*divisible"):
        open_slice("v5e:3x3")


@needs_libtpu
def test_libtpu_may_be_in_use_elsewhere():
    open_slice("v5e:2x2")
    assert os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"


def test_a_slice_that_there_is_not_is_a_mistake_of_one_line(capsys):
    assert main(["", "--config=configs/quickstart.py", "--mode=describe", "--topology=v9:2x2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("jformer: --topology=v9:2x2: no such slice; the families are v4, v5e, v5p, v6e: ")
    assert printed.err.count("\n") == 1
