"""Nothing that is read is run: SECURITY.md says what is trusted, and these tests hold the sources against it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("jformer", "configs", "experiments", "docs") for path in (ROOT / folder).rglob("*.py")
)
CODE_RUNS_HERE = {
    "jformer/config/config_files.py",  # config and experiment files are Python
    "jformer/data/preparation.py",  # pickles go through pipes to the processes that it started, and back
    "experiments/speed/steps_flax.py",  # runs the model of the checkout that its option names
}
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "runpy"}
NAMES = {"exec", "eval", "compile", "__import__"}
CALLS = {
    "system", "popen", "exec_module", "mktemp", "unpack_archive", "spec_from_file_location", "read_pickle",
    "getoutput", "getstatusoutput",
}  # fmt: skip
OF_MODULES = {*(("builtins", name) for name in NAMES), ("torch", "load")}
KEYWORDS = {"shell", "allow_pickle"}  # that must not be true


def offences(tree):
    """Yield the line and the name of everything that may run what it is given, or unpacks unchecked."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from ((node.lineno, module) for module in modules if module.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        name, method = getattr(node.func, "id", ""), getattr(node.func, "attr", "")
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        owner = getattr(getattr(node.func, "value", None), "id", "")
        tensors_alone = getattr(given.get("weights_only"), "value", None) is True
        if name in NAMES or {name, method} & CALLS or ((owner, method) in OF_MODULES and not tensors_alone):
            yield node.lineno, name or method
        if (owner, method) == ("np", "load") and len(node.args) > 2:
            yield node.lineno, "allow_pickle by its place"
        if method in ("extractall", "extract") and "filter" not in given:
            yield node.lineno, f"{method} without filter"
        for keyword in KEYWORDS & given.keys():
            if not (isinstance(given[keyword], ast.Constant) and not given[keyword].value):
                yield node.lineno, keyword


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from yaml import load", "exec(text)", "eval(text)", "compile(text, name, 'exec')",
        "os.system(x)",
        "run(command, shell=True)", "run(command, shell=asked)", "np.load(path, allow_pickle=True)",
        "tar.extractall(x)",
        "spec.loader.exec_module(module)", "__import__(name)",
        "builtins.exec(text)", "subprocess.getoutput(text)", "pandas.read_pickle(path)", "torch.load(path)",
        "torch.load(path, weights_only=some)",
        "np.load(path, None, True)",
    ],
)  # fmt: skip
def test_the_search_sees_what_it_looks_for(text):
    assert list(offences(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "jit(f).lower(x).compile()", "run(command, shell=False)", "tar.extractall(filter='data')",
        "torch.load(path, weights_only=True)",
    ],
)  # fmt: skip
def test_the_search_lets_pass_what_is_harmless(text):
    assert not list(offences(ast.parse(text)))


def test_code_that_is_read_runs_in_these_places_only():
    found = {}
    for path in SOURCES:
        if lines := list(offences(ast.parse(path.read_text()))):
            found[str(path.relative_to(ROOT))] = lines
    assert set(found) == CODE_RUNS_HERE, found


def test_hostile_files_are_read_or_refused_within_bounds():
    """Ten mutations of each kind; `python -m tests.faults.hostile 10000 0` tries more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.hostile", "470", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["defects"] == []
    assert result["escaped"] == []
    assert result["grown"] <= 64 << 20
    assert result["ends"]["read"] + result["ends"]["refused"] == 470


@pytest.mark.slow
def test_hostile_directories_of_models_are_imported_or_refused():
    """Four mutations of each file; `python -m tests.faults.hostile_models 5000 0` tries more."""
    command = [sys.executable, "-m", "tests.faults.hostile_models", "120", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2_000:]
    result = json.loads(done.stdout)
    assert result["defects"] == []
    assert result["grown"] <= 64 << 20
    assert result["ends"]["read"] + result["ends"]["refused"] == 120
