import gc
import logging
import sys
import warnings
from types import SimpleNamespace

import pytest

from jformer.checkpoints import quiet_orbax_logging as twice
from jformer.checkpoints.quiet_orbax_logging import log_failures_once


@pytest.mark.parametrize(("path", "traceback", "kept"), [
    ("/lib/orbax/future.py", True, False), ("/lib/orbax/future.py", False, True), ("/lib/other/future.py", True, True),
])  # fmt: skip
def test_records_of_orbax_with_a_traceback_are_left_out(path, traceback, kept):
    log_failures_once()
    error = (ValueError, ValueError("x"), None) if traceback else None
    record = logging.LogRecord("absl", logging.ERROR, path, 1, "failed", (), error)
    assert bool(logging.getLogger("absl").filter(record)) == kept


@pytest.mark.parametrize(("error", "printed"), [
    (RuntimeError("Event loop is closed"), False), (RuntimeError("another"), True),
    (ValueError("Event loop is closed"), True),
])  # fmt: skip
def test_calls_to_a_loop_that_is_over_are_left_out(error, printed, monkeypatch):
    seen = []
    monkeypatch.setattr(twice, "_print_unraisable", seen.append)
    monkeypatch.setattr(sys, "unraisablehook", None)
    log_failures_once()
    sys.unraisablehook(SimpleNamespace(exc_type=type(error), exc_value=error))
    assert bool(seen) == printed


class Store:
    """As Orbax calls its own."""

    async def _get_array_metadatas(self):
        pass

    async def read(self):
        pass


@pytest.mark.parametrize(("name", "told"), [("_get_array_metadatas", False), ("read", True)])
def test_reads_that_were_cancelled_before_they_began_are_left_out(name, told):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        log_failures_once()
        getattr(Store(), name)()
        gc.collect()
    assert bool(found) == told
