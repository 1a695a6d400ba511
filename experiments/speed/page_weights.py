"""How large is a page before anything is in it, and how soon does the largest one open?

Programs, style and frame of each page, in kB, and deflated as servers do; pages of your own runs, if named, get further
rows. With --tokens, an explorer's page of a model with all three parts that attend, 12 layers and 12 heads,
is made of softmax over Gaussian scores (deviation 2, nothing that deflates well) and opened in Chromium (Playwright):
seconds until the first large map is there, and until all is read, and what the browser's processes hold more than with
an empty tab (proportional set size): then, at most (looked at every 50 ms), later, and with its garbage collected.
DevTools, by which Playwright controls the browser, keeps some of a page's source in memory; so the page is opened once
more without it, for the private dirty pages of its process, beside those of an empty tab.

Command:  python -m experiments.speed.page_weights [PAGE.html ...] [--tokens=512] [--layers=12] [--smoke]
"""

import contextlib
import gzip
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from absl import app, flags

from experiments.measure import smoke_sizes
from jformer.inference.answers import Attended, AttentionWeights, Part
from jformer.tools.pages import page
from jformer.tools.pages.explorer import Shown, explorer_page
from jformer.tools.pages.run_report import CHARTS, PROGRAMS, curves

TOKENS = flags.DEFINE_integer("tokens", 0, "Tokens of source and target; 0 makes no explorer's page.")
LAYERS = flags.DEFINE_integer("layers", 12, "Layers of encoder and decoder.")
HEADS = 12
FIRST_MAP, PATIENCE = "svg image", 120_000  # of a head enlarged; milliseconds


def empty_pages() -> dict[str, bytes]:
    """Return every page without what a run puts into it. The server's is three files that a browser asks for."""
    charts = page.page("", [CHARTS], PROGRAMS, curves({"": []}))
    served = files("jformer.tools.server")
    pages = {"explorer": explorer_page("", []), "report, comparison": charts, "report of a sweep": page.page("", [])}
    parts = [served.joinpath(f"page.{ending}").read_bytes() for ending in ("html", "js", "css")]
    return {name: text.encode() for name, text in pages.items()} | {"server": b"".join(parts)}


def largest_page(tokens: int, layers: int) -> str:
    """Return the page of one source and target of `tokens` tokens, with all parts."""
    draw, words = np.random.default_rng(0), tuple(f"token{i}" for i in range(tokens))

    def attention(part: Part) -> AttentionWeights:
        mask = np.ones((tokens, tokens), bool)
        mask = np.tril(mask) if part is Part.DECODER_SELF else mask
        weights = np.empty((layers, HEADS, tokens, tokens), np.float32)
        for layer in weights:
            layer[:] = np.exp(2 * draw.standard_normal(layer.shape, np.float32)) * mask
            layer /= layer.sum(axis=-1, keepdims=True)
        return AttentionWeights(part, weights, mask, words, words)

    text = " ".join(words)
    encoder, decoder, cross = map(attention, Part)
    return explorer_page("Large", [Shown(Attended(text, text, encoder, decoder, cross))])


def chromium() -> str:
    """Return where the browser is, "" where there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome") or ""


def processes(first: int) -> list[int]:
    """Return a process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found, below = [], [first]
    while below:
        one = below.pop()
        found.append(one)
        below += parents.get(one, [])
    return found


def memory(process: int, kind: str) -> float:
    """Return the MB of one kind ("Pss", "Private_Dirty") that a process holds; 0 for one that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1e3


def held(process: int) -> float:
    """Return the MB that a process and all below it hold, shared memory divided among those that share it."""
    return sum(memory(one, "Pss") for one in processes(process))


@contextlib.contextmanager
def watched(empty: float) -> Iterator[list[tuple[float, float]]]:
    """Sample the memory above `empty` during the context; the list gets pairs (MB, second)."""
    over, began, seen = threading.Event(), time.perf_counter(), [(0.0, 0.0)]

    def look() -> None:
        while not over.wait(0.05):
            seen.append((held(os.getpid()) - empty, time.perf_counter() - began))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


def opened(path: Path) -> str:
    """Open a page in Chromium; return a line on how long that took and how much memory it holds."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1150, "height": 900})
        tab.goto("about:blank")
        tab.wait_for_timeout(1_000)
        empty = held(os.getpid())
        with watched(empty) as seen:
            began = time.perf_counter()
            tab.goto(f"file://{path}", wait_until="commit", timeout=PATIENCE)
            tab.wait_for_selector(FIRST_MAP, state="attached", timeout=PATIENCE)
            first, then = time.perf_counter() - began, held(os.getpid()) - empty
            tab.wait_for_load_state("load", timeout=PATIENCE)
            whole = time.perf_counter() - began
            tab.wait_for_timeout(1_000)
            after = held(os.getpid()) - empty
            tab.wait_for_timeout(9_000)
        later = held(os.getpid()) - empty
        tab.context.new_cdp_session(tab).send("HeapProfiler.collectGarbage")
        tab.wait_for_timeout(500)
        collected = held(os.getpid()) - empty
        browser.close()
    most, at = max(seen)
    return (
        f"first large map {first:.2f} s, {then:.0f} MB more; read to its end {whole:.2f} s, "
        f"{after:.0f} MB more a second later; at most {most:.0f} MB, after {at:.2f} s; "
        f"{later:.0f} MB 10 s later, {collected:.0f} MB once garbage is collected"
    )


def alone(address: str) -> tuple[float, float]:
    """Return the private MB of the page's own process at most, and after 12 s, in a browser without DevTools."""
    with tempfile.TemporaryDirectory() as folder:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1150,900")
        command = [chromium(), *options, f"--user-data-dir={folder}/profile", address]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen: dict[int, list[float]] = {}
        end = time.perf_counter() + 12
        while time.perf_counter() < end:
            for one in processes(browser.pid):
                with contextlib.suppress(OSError):
                    if b"--type=renderer" in Path(f"/proc/{one}/cmdline").read_bytes():
                        seen.setdefault(one, []).append(memory(one, "Private_Dirty"))
            time.sleep(0.05)
        browser.terminate()
        browser.wait()
    own = max(seen.values(), key=max)
    return max(own), own[-1]


def main(argv: Sequence[str]) -> None:
    """Print a row for each page, and what opening the largest takes."""
    smoke_sizes(tokens=8, layers=1)
    print(f"{'page':<24}{'kB':>10}{'deflated':>10}")
    for name, content in (empty_pages() | {path: Path(path).read_bytes() for path in argv[1:]}).items():
        print(f"{name:<24}{len(content) / 1e3:>10.1f}{len(gzip.compress(content)) / 1e3:>10.1f}")
    if TOKENS.value:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "large.html")
            path.write_text(largest_page(TOKENS.value, LAYERS.value))
            size = (
                f"{TOKENS.value} tokens, 3 x {LAYERS.value} layers of {HEADS} heads: {path.stat().st_size / 1e6:.1f} MB"
            )
            print(f"{size}; {opened(path) if chromium() else 'no Chromium here to open it'}", flush=True)
            if chromium():
                tab, (most, later) = alone("about:blank")[1], alone(f"file://{path}")
                print(
                    f"its own process: at most {most:.0f} MB, {later:.0f} MB later; that of an empty tab {tab:.0f} MB"
                )


if __name__ == "__main__":
    app.run(main)
