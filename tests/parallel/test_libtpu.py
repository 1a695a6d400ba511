"""libtpu says nothing where there is no TPU, and is left alone where there is one."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from jformer.parallel import libtpu


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """Return the environment of a machine with libtpu, and what sets the vendor and the kind of its one device."""
    variables = {}
    monkeypatch.setattr(libtpu, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(libtpu, "PCI_DEVICES", tmp_path)
    monkeypatch.setattr(libtpu, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(libtpu, "os", SimpleNamespace(environ=variables))
    (tmp_path / "0000:00:04.0").mkdir()

    def put(vendor, kind="0x0063"):
        for name, value in {"vendor": vendor, "device": kind}.items():
            (tmp_path / "0000:00:04.0" / name).write_text(f"{value}\n")

    return variables, put


@pytest.mark.parametrize("device", [("0x8086",), ("0x1ae0", "0x0042")], ids=["another's", "Google's network card"])
def test_it_is_silenced_where_there_is_no_tpu(environment, device):
    variables, put = environment
    put(*device)
    variables["TPU_WORKER_HOSTNAMES"] = "mine"
    libtpu.silence_libtpu()
    assert variables == {**libtpu.SETTINGS, "TPU_WORKER_HOSTNAMES": "mine"}


@pytest.mark.parametrize("given", [{}, {"JAX_PLATFORMS": ""}])
def test_it_is_left_alone_where_there_is_a_tpu_or_a_choice(environment, given):
    variables, put = environment
    put("0x8086" if given else "0x1ae0")
    variables.update(given)
    libtpu.silence_libtpu()
    assert variables == given


@pytest.mark.skipif(not find_spec("libtpu") or libtpu.has_tpu(), reason="needs libtpu, and no TPU")
def test_jax_starts_without_a_word():
    program = "from jformer.parallel.libtpu import silence_libtpu as f; f(); import jax; print(jax.devices())"
    inherited = {name: value for name, value in os.environ.items() if name not in {"JAX_PLATFORMS", *libtpu.SETTINGS}}
    done = subprocess.run([sys.executable, "-c", program], env=inherited, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_cuda_libraries_are_not_checked_without_a_driver(environment, monkeypatch, tmp_path):
    variables, set_vendor = environment
    set_vendor("0x1ae0\n")
    monkeypatch.setattr(libtpu, "NVIDIA_DRIVER", tmp_path / "none")
    libtpu.silence_libtpu()
    assert variables == {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
