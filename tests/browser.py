"""A page in a real browser, where there is one."""

import html
import importlib.util
import json
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


WINDOWS = {"wide and light": (), "narrow and dark": ("--window-size=390,800", "--force-dark-mode")}


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


def barriers(text: str) -> list[str]:
    """Return what axe-core finds that keeps people out of a page, all sections open; skip the test without axe-core."""
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("no axe-core here: pip install axe-playwright-python, to look for what keeps people out")
    program = Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8").replace("</script>", r"<\/script>")
    looking = f"""<script>{program}</script><script>addEventListener("load", () => setTimeout(async () => {{
      for (const section of document.querySelectorAll("details")) section.open = true;
      const {{ violations }} = await axe.run();
      const told = violations.map(({{ id, help, nodes }}) => `${{id}}: ${{help}}: ${{nodes[0].html}}`);
      document.body.setAttribute("data-barriers", JSON.stringify(told));
    }}, 500))</script></body>"""
    open_to_programs = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    met = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        path.write_text(open_to_programs.replace("</body>", looking), encoding="utf-8")
        for window, options in WINDOWS.items():
            drawn = visit(f"file://{path}", *options, "--virtual-time-budget=30000")
            told = re.search(r'data-barriers="([^"]*)"', drawn.html)
            assert told, drawn.console
            met += [f"{window}: {each}" for each in json.loads(html.unescape(told[1]))]
    return met


def visit(address: str, *options: str) -> Drawn:
    """Open what is at an address; skip the test where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium, to draw the pages")
    with tempfile.TemporaryDirectory() as folder:
        command = [CHROMIUM, *OPTIONS, *options, f"--user-data-dir={folder}/profile", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Drawn(done.stdout, re.findall(r"CONSOLE.*", done.stderr))
