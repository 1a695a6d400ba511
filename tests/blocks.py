"""The blocks of code in the documents: what there is of them, and what runs them with trainings of a few updates."""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from jformer.config.config_files import run_config_file
from jformer.config.options import ONE_PASS

ROOT = Path(__file__).parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(
    r"^```(?P<language>python|bash)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
UPDATES = re.compile(r"(num_steps|\w+_every)(\"?[=:] ?)([\d_]+)")
SHORTER = 100  # times
INSTALLS = re.compile(r"^(?:pip install|python3 -m venv) .*\n", re.MULTILINE)  # needs an index of packages
FILES = ("def get_config", "def sweep")  # what a block with them defines is in the page's file mine.py
WIDTH = 32
SMALL = " ".join(
    f"--config.{option}"
    for option in (
        *("train.num_steps=4", "train.num_epochs=0"),
        *("train.log_every=2", "train.eval_every=4", "train.checkpoint_every=4"),
        *("model.num_layers=1", f"model.d_model={WIDTH}"),
        *("data.num_pairs=300", "data.vocab_size=300"),
    )
)
SHORT_ANSWERS = " --config.decode.max_length=6"  # of searches; tasks that answer in one pass refuse it


class Block(NamedTuple):
    """One block of a page."""

    page: str
    line: int  # of the page, of its first line
    language: str
    code: str
    shown: str  # what the page says that it prints

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page):
    """Return the blocks of a page in their order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = BLOCK.finditer(text)
    return [
        Block(page, text.count("\n", 0, each.start("code")) + 1, each["language"], each["code"], each["shown"] or "")
        for each in found
    ]


def shortened(code, folder=ROOT):
    """Return a block whose trainings have a hundredth of their updates, and at least one; configs are tiny.

    Word vectors are as small as the models that begin with them. `folder`: where the block's configs are.
    """
    code = UPDATES.sub(lambda found: f"{found[1]}{found[2]}{-(-int(found[3]) // SHORTER)}", INSTALLS.sub("", code))
    code = re.sub(r"(jformer\.skipgram .*--size=)\d+", rf"\g<1>{WIDTH}", code)

    def small(found):
        config = folder / found[1]
        with own_modules(folder):
            one_pass = config.exists() and run_config_file(config).task in ONE_PASS
        return f"{found[0]} {SMALL}{'' if one_pass else SHORT_ANSWERS}"

    return re.sub(r"--config=((?:configs/\w+|mine)\.py|quickstart)", small, code)


@contextlib.contextmanager
def own_modules(folder):
    """Import modules of a folder first, and forget them afterwards."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for path in folder.glob("*.py"):
            if path.stem not in before:
                sys.modules.pop(path.stem, None)


class Reader:
    """Somebody who types the blocks of a page, one after the other, in a folder."""

    def __init__(self, folder, home):
        """Begin; beside the folder's own files there are those of a checkout that commands read."""
        self.folder, self.names = folder, {}
        commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**os.environ, "HOME": str(home), "PATH": commands, "PYTHONPATH": str(ROOT)}
        self.environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu"}
        for name in ("configs", "experiments"):
            if not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)

    def run(self, block, whole=False):
        """Run a block, shortened or whole, and return what it printed; AssertionError if a command of it fails."""
        began, code = time.monotonic(), block.code if whole else shortened(block.code, self.folder)
        printed = self.python(block, code) if block.language == "python" else self.bash(block, code)
        print(f"{block}: {time.monotonic() - began:.0f} s", flush=True)
        return printed

    def python(self, block, code):
        """Run code of a block in this process, in the names of those before it."""
        if any(what in code for what in FILES):
            (self.folder / "mine.py").write_text(code, encoding="utf-8")
        if named := re.match(r"# (\w+\.py)\n", code):  # blocks of one file, one after the other
            with (self.folder / named[1]).open("a", encoding="utf-8") as file:
                file.write(code)
        above = "\n" * (block.line - 1)  # so that a traceback names the page's line
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            own_modules(self.folder),
        ):
            exec(compile(above + code, ROOT / block.page, "exec"), self.names)
        return printed.getvalue()

    def bash(self, block, code):
        """Run code of a block as a script that ends where a command fails, in a pipe too."""
        command = ["bash", "-e", "-o", "pipefail", "-c", code]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{code}{done.stdout[-2_000:]}{done.stderr[-4_000:]}"
        return done.stdout
