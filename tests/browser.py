"""A page in a real browser, where there is one."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# As a text of a page it stays text.
HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>"
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=3000")


class Drawn(NamedTuple):
    html: str
    """The page's elements after its program ran."""
    console: list[str]
    """What the browser said of it."""


def draw(text: str, section: str = "") -> Drawn:
    """Open a page at a section; skip the test where there is no browser."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(text, encoding="utf-8")
        return visit(f"file://{path}#{section}")


def visit(address: str) -> Drawn:
    """Open what is at an address; skip the test where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium, to draw the pages")
    with tempfile.TemporaryDirectory() as folder:
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder}/profile", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Drawn(done.stdout, re.findall(r"CONSOLE.*", done.stderr))
