"""A page in a real browser, where there is one: drawn, searched for what keeps people out, and used by keyboard."""

import contextlib
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


# Opens every section, and is done when each was drawn: an event does it later than that, of packed data later still.
OPEN_SECTIONS = """() => Promise.all([...document.querySelectorAll("details:not([open])")].map((section) => {
  const drawn = new Promise((done) => section.addEventListener("toggle", () => done(), { once: true }));
  section.open = true;
  return drawn;
})).then(() => new Promise((done) => setTimeout(done, 200)))"""
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
      await ({OPEN_SECTIONS})();
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


# What can be reached by keyboard, numbered in the order of the page.
NUMBERED = """() => {
  const places = "a[href], button, input, select, textarea, summary, [tabindex]";
  const reachable = (place) => place.tabIndex >= 0 && !place.disabled && place.checkVisibility();
  const found = [...document.querySelectorAll(places)].filter(reachable);
  found.forEach((place, i) => place.setAttribute("data-place", i));
  return found.map((place) => place.outerHTML.slice(0, 120));
}"""
FOCUSED = """() => {
  const place = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(place);
  const seen = place.matches(":focus-visible") && outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
  return [place.getAttribute("data-place"), seen];
}"""


@contextlib.contextmanager
def used(page, width=1200):
    """Open an address, or a page's text, and give the page of playwright to press keys on; skip the test without one.

    Fails if the page complains, or asks for anything that is not its own.
    """
    api = pytest.importorskip("playwright.sync_api", reason="no playwright here: the extra pages has it")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium, to use the pages by keyboard")
    with tempfile.TemporaryDirectory() as folder, api.sync_playwright() as playwright:
        address = page
        if not page.startswith("http"):
            Path(folder, "page.html").write_text(page, encoding="utf-8")
            address = f"file://{folder}/page.html"
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": width, "height": 800})
        complaints, asked = [], []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(address)
        yield tab
        browser.close()
    own = ("data:", "blob:", address.partition("#")[0] if page == address else "file://")
    assert complaints == []
    assert [url for url in asked if not url.startswith(own)] == []


def overhang(page):
    """Return by how many pixels a page is wider than a phone, and than A4 between its margins, all sections open."""
    wider = "() => document.documentElement.scrollWidth - innerWidth"
    with used(page, width=390) as tab:
        tab.evaluate(OPEN_SECTIONS)
        phone = tab.evaluate(wider)
        tab.set_viewport_size({"width": 718, "height": 1_000})
        tab.emulate_media(media="print")
        return phone, tab.evaluate(wider)


def tabbed(tab):
    """Press Tab until everything was reached that can be; AssertionError for what is not, or is not seen to be."""
    places = tab.evaluate(NUMBERED)
    reached, unseen = set(), []
    tab.evaluate("() => document.activeElement.blur()")
    for _ in range(2 * len(places) + 5):
        tab.keyboard.press("Tab")
        place, seen = tab.evaluate(FOCUSED)
        if place is not None:
            reached.add(int(place))
            unseen += [places[int(place)]] * (not seen)
    assert not unseen, f"no outline shows where the keyboard is: {unseen}"
    assert not [each for i, each in enumerate(places) if i not in reached], "Tab does not reach these"
    return places


def go_to(tab, selector):
    """Press Tab until the keyboard is at an element."""
    for _ in range(200):
        if tab.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        tab.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {selector}")
