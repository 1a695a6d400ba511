"""Silence libtpu on machines without a TPU, where it is installed to compile for slices. Does not import JAX."""

import os
from importlib.util import find_spec
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_DRIVER = Path("/dev/nvidiactl")
GOOGLE = "0x1ae0"  # PCI vendor of TPUs, which JAX also looks for
NO_TPUS = ("0x001f", "0x0042")  # of the same vendor: disks and network cards of virtual machines
SETTINGS = {  # with these it does not query a metadata server, of which there is none
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may be compiling with it
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # does not affect the slices that programs are compiled for
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def silence_libtpu() -> None:
    """Keep libtpu and JAX's CUDA plugin from printing a page of errors when JAX looks for a device that is not there.

    Call this before JAX initializes its devices. Variables that are already set do not change, nor do libtpu's if there
    is a TPU or JAX_PLATFORMS is set.
    """
    if find_spec("libtpu") and "JAX_PLATFORMS" not in os.environ and not has_tpu():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
    if not NVIDIA_DRIVER.exists():  # the plugin may be installed just to compile, without libraries that it checks
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def has_tpu() -> bool:
    """Return whether a TPU is on the PCI bus."""
    vendors = PCI_DEVICES.glob("*/vendor")
    found = [path.with_name("device") for path in vendors if path.read_text().strip() == GOOGLE]
    return any(path.read_text().strip() not in NO_TPUS for path in found)
