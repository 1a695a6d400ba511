"""libtpu, TPU's library, on a machine without a TPU: it is installed there to compile for slices. Knows no JAX."""

import os
from importlib.util import find_spec
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_DRIVER = Path("/dev/nvidiactl")
GOOGLE = "0x1ae0"  # vendor of TPUs on the PCI bus, which JAX looks for, too
SETTINGS = {  # with these it neither asks a metadata server nor complains that nobody answers
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # another process may be compiling with it
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # says nothing about the slices that programs are compiled for
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def silence_libtpu() -> None:
    """Keep libtpu and JAX's CUDA plugin from printing a page of errors where JAX looks for a device that is not there.

    To be called before JAX looks for devices. Where there is a TPU, or JAX_PLATFORMS says what to look for, nothing is
    changed; nor is any variable that is set already.
    """
    if find_spec("libtpu") and "JAX_PLATFORMS" not in os.environ and not has_tpu():
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
    if not NVIDIA_DRIVER.exists():  # the plugin may be installed to compile, without the libraries that it would check
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def has_tpu() -> bool:
    """Return whether a device of Google's is on the PCI bus."""
    return any(vendor.read_text().strip() == GOOGLE for vendor in PCI_DEVICES.glob("*/vendor"))
