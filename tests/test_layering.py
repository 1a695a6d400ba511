"""Who may import whom: docs/map.md draws the arrows, and these tests keep the code and that page the same."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from experiments.checks.house import (
    arrows_between_modules,
    floors,
    imports,
    in_circles,
    ours,
    parameters,
    room_of,
    trees,
)

ROOT = Path(__file__).parents[1]

NEVER = {  # room → packages
    "models": {"optax", "orbax", "ml_collections", "absl", "sentencepiece"},
    "decoding": {"flax", "optax", "orbax", "ml_collections", "absl"},
    "data": {"jax", "jaxlib", "flax", "optax", "orbax", "ml_collections", "absl"},
    "config": {"jax", "flax", "optax"},
    "parallel": {"optax", "orbax", "ml_collections", "absl"},
    "storage": {"jax", "flax", "optax"},
    "integrity": {"jax", "flax", "optax"},
    "errors": {"jax", "flax", "optax", "etils"},
}
HEAVY = {"tensorflow", "tensorflow_datasets", "torch", "transformers"}
WANTED = {  # module → what it imports of these when it is used
    "data.sources.tfds": {"tensorflow_datasets"},
    "tools.hf.against": {"torch", "transformers"},
    "tools.hf.unpickle": {"torch"},
}
BELOW_THE_DOOR = {"ml_collections": {"main", "config", "__init__"}, "absl": {"main", "config"}}
# By hand: the compiler's own collectives, which it adds where arrays are split, have no name in our code.
COLLECTIVES = {
    "all_gather", "all_to_all", "axis_index", "pmap", "pmax", "pmean", "pmin", "ppermute", "psum", "psum_scatter",
    "pvary", "reduce_scatter",
}  # fmt: skip
LISTED_FROM = 5  # parameters of a public function, which its docstring lists then
WITHOUT_JAX = ("data", "tools.sweep", "tools.compare", "tools.supervise", "storage", "integrity", "errors", "config")
COMMANDS = ("main", "hf", "compare", "sweep", "skipgram", "supervise")


def drawn():
    """Read the map's table: room → (its floor, the rooms it imports)."""
    text = (ROOT / "docs" / "map.md").read_text().partition("| floor | room | imports |")[2].partition("\n\n")[0]
    rooms = {}
    for row in text.splitlines()[2:]:
        floor, name, targets = (cell.strip() for cell in row.split("|")[1:4])
        rooms[name.strip("`/")] = (int(floor), set(re.findall(r"[\w.]+", targets)))
    return rooms


def packages(tree, nested=True):
    """Return the packages that are imported."""
    return {name.partition(".")[0] for name in imports(tree, nested)}


def test_every_room_is_on_the_map():
    assert set(drawn()) == {room_of(module) for module in trees(ROOT)}


def test_a_room_imports_what_the_map_says_and_nothing_else():
    for room, (_, allowed) in drawn().items():
        targets = {
            target
            for module in trees(ROOT)
            if room_of(module) == room
            for target in arrows_between_modules(ROOT)[module]
        }
        found = {target if target in allowed else room_of(target) for target in targets} - {room, "errors"}
        assert found == allowed, room


def test_arrows_point_down():
    rooms = drawn()
    for room, (floor, targets) in rooms.items():
        for target in targets:
            assert rooms[room_of(target)][0] < floor, f"{room} may not import {target}: it lies as high or higher"


def test_the_core_imports_no_tools():
    for module, targets in arrows_between_modules(ROOT).items():
        if not module.startswith("tools") and module not in COMMANDS:
            assert not [target for target in targets if target.startswith("tools")], module


def test_no_modules_import_each_other_in_a_circle():
    # A table of parts names the parts, and a part may use what stands beside the table.
    assert not in_circles(arrows_between_modules(ROOT))


def test_a_room_keeps_to_its_libraries():
    for module, tree in trees(ROOT).items():
        used = packages(tree)
        assert not used & NEVER.get(room_of(module), set()), module
        for package, rooms in BELOW_THE_DOOR.items():
            assert package not in used or room_of(module) in rooms, f"{module}: {package} stays at the door"


def test_nothing_heavy_is_imported_at_the_top():
    for module, tree in trees(ROOT).items():
        at_the_top = {"tensorflow_datasets"} if module == "data.sources.tfds" else set()
        assert packages(tree, nested=False) & HEAVY <= at_the_top, module
        assert packages(tree) & HEAVY <= WANTED.get(module, set()), module


def test_collectives_by_hand_stand_in_parallel_only():
    for module, tree in trees(ROOT).items():
        used = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)} & COLLECTIVES
        used |= {imported.rpartition(".")[2] for imported in imports(tree)} & COLLECTIVES
        assert not used or room_of(module) == "parallel", module


def test_annotations_are_checked_as_written():
    assert not [module for module, tree in trees(ROOT).items() if "__future__.annotations" in set(imports(tree))]


def test_nobody_imports_the_door_or_the_trainer_and_nothing_imports_configs():
    for module, tree in trees(ROOT).items():
        assert "main" not in arrows_between_modules(ROOT)[module], module
        assert "trainer" not in arrows_between_modules(ROOT)[module] or module in ("main", ""), module
        assert not packages(tree) & {"configs", "experiments", "tests"}, module


def test_config_files_import_options_and_each_other_as_a_wheel_can():
    for path in (ROOT / "configs").glob("*.py"):
        tree = ast.parse(path.read_text())
        assert {room_of(target) for target in ours(tree, trees(ROOT))} <= {"config", "recipes"}, path.name
        assert not packages(tree) & {"configs"}, f"{path.name}: a wheel has them as jformer.recipes"


def test_rooms_without_jax_import_none():
    names = [f"jformer.{module}" for module in trees(ROOT) if room_of(module) in WITHOUT_JAX]
    assert {room_of(name.removeprefix("jformer.")) for name in names} == set(WITHOUT_JAX)
    code = f"import sys; import {', '.join(names)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow", "torch"}


def public_functions():
    """Yield the functions that other files may call, at the top of a file or methods: (its name, its definition)."""
    for module, tree in trees(ROOT).items():
        for place in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            for node in place.body:
                hidden = isinstance(place, ast.ClassDef) and place.name.startswith("_")
                if isinstance(node, ast.FunctionDef) and not hidden and re.match("[^_]|__init__", node.name):
                    yield f"{module}.{node.name}", node


def listed(node):
    """Return the parameters in the section Args of a function's docstring; a line may be about several of them."""
    section = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return [name for names in re.findall(r"^ {4}(\w[\w, ]*):", section, re.MULTILINE) for name in names.split(", ")]


def test_a_public_function_of_many_parameters_says_what_each_of_them_is():
    for name, node in public_functions():
        if parameters(node.args) >= LISTED_FROM:
            named = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            others = {node.args.kwarg.arg} if node.args.kwarg else set()  # which may be listed
            assert {*listed(node)} - others == {*named} - {"self", "cls"}, name


def test_floors_and_circles_are_those_of_the_arrows():
    tower = {"a": set(), "b": {"a"}, "c": {"a", "b"}, "d": {"a"}}
    assert floors(tower) == [{"a"}, {"b", "d"}, {"c"}]
    assert not in_circles(tower)
    assert in_circles({**tower, "b": {"a", "e"}, "e": {"c"}}) == {"b", "c", "e"}


def test_training_and_answering_import_nothing_that_takes_long_and_few_runs_need():
    program = "import sys, jformer.trainer, jformer.inference.answer_files; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"tensorflow_datasets", "tensorflow", "pyarrow", "pandas", "scipy.stats"} & set(done.stdout.split())
