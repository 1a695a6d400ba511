"""The blocks of code in the documents run: all of a page in their order, in one folder, with short trainings.

Those that cannot are named below, with the reason. `JAX_PLATFORMS=cpu python -m tests.test_blocks` writes anew what
docs/walkthrough.md prints.
"""

import difflib
import functools
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

from jformer.config import default_config, resolve
from jformer.config.config_files import override
from jformer.data.tokenizers import NumberTokenizer
from jformer.main import read_flags
from jformer.tools.hf.__main__ import main as hf
from tests.blocks import BLOCK, PAGES, ROOT, Reader, blocks, shortened
from tests.tools.hf import small_runs

WALKTHROUGH = "docs/walkthrough.md"  # prints what it says
ELSEWHERE = "needs machines that are not here: tests/launch runs launch.sh with stand-ins for gcloud and Slurm"
COMPILER = "needs a compiler, and minutes: tests/tools/forecast describes slices and GPUs where it is there"
SERVER = "a server does not end by itself: tests/tools/server asks a real one"
LOADER = "tests/tools/export/test_folder.py runs it without jformer, on exported runs"
NOT_RUN = {  # page → what a block contains → why it is not run here
    "docs/parts.md": {"from comet import": "needs COMET, its own environment and a download"},
    "docs/processes.md": {"JAX_MTLS_CERT_FILE": "needs keys: tests/parallel/processes makes some"},
    "docs/recipes.md": {
        'weight=3.0, test=("medical=test",)': "begins with a run of another corpus; checked as a config below",
        "runs/medical_on_general": "of the block above it",
    },
    "docs/serving.md": {
        "--mode=serve": SERVER,
        "curl": SERVER,
        "import ctranslate2": LOADER,
        "from jax import export": LOADER,
    },
    "docs/tpu.md": {
        "--topology=v5litepod-16": COMPILER,
        "--topology=h100:8": COMPILER,
        "JFORMER_ZONE": ELSEWHERE,
        "launch.sh slurm": ELSEWHERE,
        "launch.sh all --hosts": ELSEWHERE,
        "--coordinator=HOST0": ELSEWHERE,
        "launch.sh local": ELSEWHERE,
    },
}


def why_not(block):
    """Return why a block is not run, or nothing."""
    return next((reason for part, reason in NOT_RUN.get(block.page, {}).items() if part in block.code), "")


def runnable(page):
    return [block for block in blocks(page) if not why_not(block)]


def test_what_is_not_run_is_there():
    for page, parts in NOT_RUN.items():
        for part in parts:
            assert sum(part in block.code for block in blocks(page)) == 1, (page, part)


def test_trainings_have_a_hundredth_of_their_updates_and_small_models():
    code = 'num_steps=600, eval_every=0, "train.num_steps": 2_000'
    assert shortened(code) == 'num_steps=6, eval_every=0, "train.num_steps": 20'
    assert "--config=configs/quickstart.py --config.train.num_steps=4" in shortened("x --config=configs/quickstart.py")
    assert shortened("pip install jformer\ntrue\n") == "true\n"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_can_be_read(page):
    for block in blocks(page):
        if block.language == "python":
            compile(block.code, str(block), "exec")
        else:
            done = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True)
            assert done.returncode == 0, f"{block}: {done.stderr}"


def commands(page):
    """Yield the words of every jformer.main in the blocks of a page, but for those that a shell fills in."""
    for block in blocks(page):
        for command in re.findall(r"python -m jformer\.main (.*)", block.code.replace("\\\n", " ")):
            words = shlex.split(re.split(r" \|| &&", command)[0], comments=True)
            yield block, [word.replace("$", "") for word in words if word[0] not in "$…"]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_and_keys_that_are_there(page):
    for block, words in commands(page):
        try:
            read_flags(["jformer", *words])
            keys = [word for word in words if word.startswith("--config.") and "data.mixture" not in word]
            override(default_config("transformer_tiny"), keys)
        except Exception as error:
            pytest.fail(f"{block}: {words}: {error}", pytrace=False)


def defined(page, needle):
    """Return the names of each block of Python of a page that holds the needle, run without computing."""
    found = [block for block in blocks(page) if block.language == "python" and needle in block.code]
    names = [{} for _ in found]
    for block, each in zip(found, names, strict=True):
        jax.eval_shape(lambda block=block, each=each: exec(compile(block.code, str(block), "exec"), each))
    return names


def test_configs_are_configs():
    found = [*defined("docs/guide.md", "def get_config"), *defined("docs/recipes.md", "def get_config")]
    assert len(found) == 5
    for names in found:
        resolve(names["get_config"]())


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory, home):
    """The run that most pages begin with, as the first block of the README makes it."""
    folder = tmp_path_factory.mktemp("first")
    Reader(folder, home).run(blocks("README.md")[0])
    return folder / "runs" / "quickstart"


@pytest.fixture
def reader(tmp_path, home, quickstart):
    shutil.copytree(quickstart, tmp_path / "runs" / "quickstart")
    write_corpora(tmp_path)
    return Reader(tmp_path, home)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page) and page != WALKTHROUGH])
def test_every_block_runs(page, reader):
    if page == "docs/tutorials.md":
        pytest.importorskip("optuna")  # of the extra for sweeps
    if page == "docs/weights.md":
        write_models(reader.folder)
    if page == "docs/guide.md":
        shutil.copytree(reader.folder / "runs" / "quickstart", reader.folder / "DIR", dirs_exist_ok=True)
    for block in runnable(page):
        reader.run(block)


def write_corpora(folder):
    """Write what the pages call DIR, PATH/… and so on: made-up words, their letters turned round as a translation."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfglmnprst" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=1 + number // 200)) for number in range(600)]
    lines = [draw.choices(words, k=draw.randint(2, 6)) for _ in range(60)]
    text = "".join(" ".join(line) + "\n" for line in lines)
    turned = "".join(" ".join(word[::-1] for word in line) + "\n" for line in lines)
    tagged = "\n".join("".join(f"{word} {draw.choice(['O', 'B-x'])}\n" for word in line) for line in lines)
    for name in ("DIR", "PATH/corpus", "PATH/multi30k", "PATH/en-de", "PATH/en-fr", "PATH/wnut17"):
        (folder / name).mkdir(parents=True)
        for split in ("train", "valid", "val", "dev", "test", "test_2016_flickr"):
            for stem in (split, f"{split}.lc.norm.tok"):
                (folder / name / f"{stem}.en").write_text(text)
                for language in ("de", "fr"):
                    (folder / name / f"{stem}.{language}").write_text(turned)
            (folder / name / f"{split}.conll").write_text(tagged)
        (folder / name / "input.txt").write_text(100 * text)
    texts = {"a.en": text, "a.de": turned, "TEXT": 20 * text, "TEXT.en": 20 * text, "TEXT.fr": 20 * turned}
    for name, content in texts.items():
        (folder / name).write_text(content)


def write_models(folder):
    """Write what docs/weights.md imports: directories as transformers has them, of random weights, and texts."""
    reranker = functools.partial(small_runs.bert, numbers=NumberTokenizer(0.0, 1.0))
    makers = {"opus-mt-en-de": small_runs.marian, "flan-t5-small": small_runs.t5, "ms-marco-MiniLM-L6-v2": reranker}
    for name, make in makers.items():
        run = make(folder / f"{name}-run")
        assert hf(["export", str(run), f"--output={folder / name}"]) == 0
    text = "".join(f"{line}\n" for line in small_runs.LINES)
    for name in ("text.en", "train.en", "test.en", "train.de", "test.de"):
        (folder / name).write_text(text)
    (folder / "names.txt").write_text("Quux\n")


def walked(folder):
    """Return the walkthrough with what its blocks print, run as they stand."""
    reader, found = Reader(folder, folder), iter(blocks(WALKTHROUGH))

    def run(match):
        printed = reader.run(next(found), whole=True)
        shown = f"\n```text\n{printed}```\n" if printed else ""
        return f"```python\n{match['code']}```\n{shown}"

    return BLOCK.sub(run, (ROOT / WALKTHROUGH).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_walkthrough_prints_what_it_shows(tmp_path):
    page, printed = (ROOT / WALKTHROUGH).read_text(encoding="utf-8"), walked(tmp_path)
    if printed != page:
        diff = difflib.unified_diff(page.splitlines(), printed.splitlines(), "the page", "what it prints", lineterm="")
        pytest.fail(f"{WALKTHROUGH} is not what its blocks print:\n" + "\n".join(diff), pytrace=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (ROOT / WALKTHROUGH).write_text(walked(Path(folder)), encoding="utf-8")
