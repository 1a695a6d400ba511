"""Take the pictures of docs/pages.md: train two small runs and a sweep, and photograph the pages that come of them.

Command:  pip install -e ".[dev,pages]" -c constraints.txt && python docs/screenshots.py --runs=runs/screenshots

It needs Chromium. Runs that are there already are taken as they are.
"""

import argparse
import contextlib
import io
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

PICTURES = Path(__file__).parent / "pictures"
COLORS = 64  # of a picture: it is drawings and text
PORT = 8765
SHORT = {
    "train.num_steps": 300,
    "train.log_every": 10,
    "train.eval_every": 100,
    "train.checkpoint_every": 100,
    "optim.schedule": "constant",
    "optim.learning_rate": 3e-3,
    "optim.warmup": 30,
    "decode.beam_size": 1,
    "data.test": "('valid',)",
}
RUNS: dict[str, dict[str, int]] = {
    "quickstart": {},
    "quickstart_half": {"model.d_model": 64, "model.d_ff": 128, "model.num_layers": 2},
}
SWEEP = '''"""Does the norm belong before or after the sublayer?"""

from jformer.tools.sweep import product

BASE = "tests/small_run.py"
METRIC = "valid/loss"
SEEDS = (0, 1)
FIXED = {"data.test": (), "train.num_steps": 40}


def sweep():
    return product({"model.norm": ["pre", "post"], "optim.learning_rate": [1e-3, 3e-3]})
'''
LINES = "2:18 – 7:40 PM\nSat, Jul 7, 1962\n"
SHOTS = {  # picture → page, section of it, width, height, whether it is dark
    "report": ("report.html", "", 1150, 900, False),
    "comparison": ("comparison/index.html", "charts", 1150, 900, False),
    "sweep": ("sweep/report/index.html", "", 1150, 900, False),
    "gallery": ("gallery.html", "", 1150, 900, False),
    "explorer_dark": ("explorer.html", "", 1150, 900, True),
    "explorer_phone": ("explorer.html", "", 390, 800, False),
    "search_tree": ("explorer.html", "search", 1150, 700, False),
}


def main() -> None:
    """Make what is missing, and take all pictures."""
    parser = argparse.ArgumentParser(description="Take the pictures of docs/pages.md.")
    parser.add_argument("--runs", type=Path, required=True)
    runs = parser.parse_args().runs
    train(runs)
    make_pages(runs)
    PICTURES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in SHOTS:
            shoot(browser, runs, name)
        shoot_server(browser, runs / next(iter(RUNS)))
        browser.close()


def shoot(browser: Browser, runs: Path, name: str) -> None:
    """Take one picture of a page that is a file."""
    page, section, width, height, dark = SHOTS[name]
    tab = browser.new_page(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    tab.goto(f"file://{(runs / page).resolve()}#{section}")
    tab.wait_for_timeout(1_000)  # until what comes into view is drawn
    if section:
        tab.locator(f"#{section}").evaluate("(place) => scrollTo(0, place.offsetTop - 10)")
    keep(name, tab.screenshot())
    tab.close()


def shoot_server(browser: Browser, workdir: Path) -> None:
    """Take the picture of a run's server that was asked something, and looked into."""
    with served(workdir):
        tab = browser.new_page(viewport={"width": 1150, "height": 900})
        tab.goto(f"http://127.0.0.1:{PORT}/")
        tab.fill("#source", LINES)
        tab.click("#answers button", timeout=300_000)
        tab.wait_for_selector("#tokens button", timeout=300_000)
        tab.fill("#source", "")
        tab.wait_for_selector("#answers button", state="detached")
        tab.fill("#source", LINES)  # once more, when all is compiled
        tab.click("#answers button")
        tab.locator("#tokens button").nth(1).click()
        keep("server", tab.screenshot(full_page=True))


def train(runs: Path) -> None:
    """Train what is not there: the quickstart shortly, a smaller one, and four trials of a sweep."""
    runs.mkdir(parents=True, exist_ok=True)
    for name, own in RUNS.items():
        if not (runs / name / "results.json").exists():
            run("main", "--config=configs/quickstart.py", f"--workdir={runs / name}", **SHORT, **own)
    if not (runs / "sweep" / "report").exists():
        (runs / "norms.py").write_text(SWEEP, encoding="utf-8")
        run("sweep", f"--experiment={runs / 'norms.py'}", f"--workdir={runs / 'sweep'}", "--workers=1")


def make_pages(runs: Path) -> None:
    """Write the gallery, the page of what a run attends to, its report, and that of both runs."""
    (runs / "lines").write_text(LINES, encoding="utf-8")
    first, second = (f"{runs / name}" for name in RUNS)
    wide = {"decode.beam_size": 4}
    explorer, lines = f"--output={runs / 'explorer.html'}", f"--input={runs / 'lines'}"
    run("main", f"--workdir={first}", "--mode=explore", lines, explorer, **wide)
    run("main", f"--workdir={first}", "--mode=report", f"--output={runs / 'report.html'}")
    run("main", "--mode=gallery", f"--output={runs / 'gallery.html'}")
    run("compare", first, second, f"--output={runs / 'comparison'}")


def run(module: str, *arguments: str, **options: object) -> None:
    """Run a command of jformer; options are those of the config."""
    keys = [f"--config.{key}={value}" for key, value in options.items()]
    subprocess.run([sys.executable, "-m", f"jformer.{module}", *arguments, *keys], check=True)


@contextlib.contextmanager
def served(workdir: Path) -> Iterator[None]:
    """Let a run answer over HTTP as long as this lasts."""
    command = [sys.executable, "-m", "jformer.main", f"--workdir={workdir}", "--mode=serve", f"--port={PORT}"]
    server = subprocess.Popen([*command, "--config.decode.beam_size=4", "--config.decode.n_best=3"])
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/health").close()
                break
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait()


def keep(name: str, png: bytes) -> None:
    """Save a picture with few colours, and say how large it is."""
    path = PICTURES / f"{name}.png"
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
