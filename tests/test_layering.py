"""Who may import whom: docs/map.md draws the arrows, and these tests keep the code and that page the same."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "jformer").rglob("*.py"))

NEVER = {  # room → packages
    "models": {"optax", "orbax", "ml_collections", "absl", "sentencepiece"},
    "decoding": {"flax", "optax", "orbax", "ml_collections", "absl"},
    "data": {"jax", "jaxlib", "flax", "optax", "orbax", "ml_collections", "absl"},
    "metrics": {"jax", "flax"},
    "writers": {"jax", "flax"},
    "config": {"jax", "flax", "optax"},
}
HEAVY = {"tensorflow", "tensorflow_datasets", "torch", "transformers"}
BELOW_THE_DOOR = {"ml_collections": {"main", "config", "config_files"}, "absl": {"main"}}
COLLECTIVES = {
    "all_gather", "all_to_all", "axis_index", "pmap", "pmax", "pmean", "pmin", "ppermute", "psum", "psum_scatter",
    "shard_map",
}  # fmt: skip


def name_of(path):
    """Return a file's module below jformer: data/plan.py is data.plan, the package itself is ''."""
    return ".".join(path.relative_to(ROOT / "jformer").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room_of(module):
    return module.partition(".")[0]


def imports(tree, nested=True):
    """Yield the absolute name of everything imported; without `nested`, only what importing the module imports."""
    for node in ast.walk(tree) if nested else at_top(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_top(node):
    """Yield the statements that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield child
            yield from at_top(child)


def ours(tree, nested=True):
    """Yield the modules below jformer that are imported: `from jformer import optim` is 'optim'."""
    modules = {name_of(path) for path in FILES}
    for name in imports(tree, nested):
        if name.partition(".")[0] == "jformer":
            inner = name.removeprefix("jformer").removeprefix(".")
            yield inner if inner in modules else inner.rpartition(".")[0]


def arrows():
    """Read the map's table: room → (what it imports at its top, what it imports inside of functions)."""
    table = {"": (set(), {"predict"})}  # the package itself, which the page describes in words
    text = (ROOT / "docs" / "map.md").read_text().partition("| room | imports |")[2].partition("\n\n")[0]
    for row in text.splitlines()[2:]:
        names, targets = row.split("|")[1:3]
        nested = set(re.findall(r"[\w.]+", "".join(re.findall(r"\(([\w., ]+)\)", targets))))
        top = set(re.findall(r"[\w.]+", re.sub(r"\(.*\)", "", targets)))
        table |= {name: (top, nested - {"not", "even", "errors"}) for name in re.findall(r"`(\w+)`", names)}
    return table


@pytest.fixture(params=FILES, ids=name_of)
def module(request):
    return name_of(request.param), ast.parse(request.param.read_text())


def test_every_room_is_on_the_map():
    assert set(arrows()) == {room_of(name_of(path)) for path in FILES}


@pytest.mark.parametrize("room", arrows())
def test_a_room_imports_what_the_map_says_and_nothing_else(room):
    top, nested = arrows()[room]
    trees = [ast.parse(path.read_text()) for path in FILES if room_of(name_of(path)) == room]
    for drawn, deep in ((top, False), (top | nested, True)):
        targets = {target for tree in trees for target in ours(tree, deep) if room_of(target) not in (room, "errors")}
        assert {target if target in drawn else room_of(target) for target in targets} == drawn


def test_a_room_keeps_to_its_libraries(module):
    name, tree = module
    packages = {imported.partition(".")[0] for imported in imports(tree)}
    assert not packages & NEVER.get(room_of(name), set())
    for package, rooms in BELOW_THE_DOOR.items():
        assert package not in packages or room_of(name) in rooms, f"{package} stays at the door"


def test_nothing_heavy_is_imported_at_the_top(module):
    name, tree = module
    top = {imported.partition(".")[0] for imported in imports(tree, nested=False)}
    assert top & HEAVY <= ({"tensorflow_datasets"} if name == "data.tfds" else set())
    anywhere = {imported.partition(".")[0] for imported in imports(tree)}
    assert anywhere & HEAVY <= ({"tensorflow_datasets"} if name == "data.tfds" else set())


def test_compiled_collectives_stay_in_the_step(module):
    name, tree = module
    used = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)} & COLLECTIVES
    used |= {imported.rpartition(".")[2] for imported in imports(tree)} & COLLECTIVES
    allowed = {"step": COLLECTIVES, "sharding": {"shard_map"}, "placement": {"shard_map"}}  # which split rows there
    assert used <= allowed.get(name, set())


def test_annotations_are_checked_as_written(module):
    assert "__future__.annotations" not in set(imports(module[1]))


def test_there_is_no_room_for_the_homeless(module):
    assert not set(module[0].split(".")) & {"util", "utils", "helpers", "common", "misc"}


def test_nobody_imports_the_door_or_the_loop_and_nothing_imports_configs():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert "main" not in set(ours(tree))
        assert "train" not in set(ours(tree)) or path.name == "main.py"
        assert not {name.partition(".")[0] for name in imports(tree)} & {"configs", "experiments", "tests"}


def test_config_files_import_options_only():
    for path in (ROOT / "configs").glob("*.py"):
        assert set(ours(ast.parse(path.read_text()))) <= {"config", "presets"}, path.name


def test_the_data_room_runs_without_jax():
    names = [f"jformer.{name_of(path)}" for path in FILES if room_of(name_of(path)) == "data"]
    assert "jformer.data.tfds" in names
    assert len(names) > 10
    code = f"import sys; import {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "numpy" in done.stdout.split()
    assert not set(done.stdout.split()) & {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "torch"}
