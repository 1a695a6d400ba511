"""How large is the project? Lines, words, arrows, modules loaded, duplicate names, functions used once, the longest.

No test fails for these figures: reviewers read them. --files lists every file of the package with its first line.

Command:  python -m experiments.checks.house [--root=ANOTHER_CHECKOUT] [--files] [--smoke]
"""

import ast
import functools
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from experiments.measure import smoke_sizes

CHECKOUT = flags.DEFINE_string("root", str(Path(__file__).parents[2]), "The checkout to measure.")
FILES = flags.DEFINE_bool("files", False, "List the files of the package with their first lines.")

ENTRIES = {"loop": "jformer.training.loop", "update": "jformer.training.step", "predictor": "jformer.inference.predict"}
# Answers a text with a beam search, and prints each file of ours in which a function ran meanwhile. Models and what
# they call do not count: a reader who follows a text to its translation takes them as given.
PATH = """
import sys, tempfile, threading
from pathlib import Path
import jformer
from experiments.untrained import write_untrained

package, found = str(Path(jformer.__file__).parent) + "/", set()

def note(frame, event, argument):
    callers = []
    while frame and (callers or frame.f_code.co_filename.startswith(package)):
        callers.append(frame.f_code.co_filename)
        frame = frame.f_back
    if event == "call" and callers and not any(name.startswith(package + "models/") for name in callers):
        found.add(callers[0].removeprefix(package))

with tempfile.TemporaryDirectory() as folder:
    predictor = jformer.load(write_untrained(Path(folder), "tiny", 50), beam_size=4)
    threading.setprofile(note)
    sys.setprofile(note)
    predictor.predict(["\\u4e01\\u4e02"])
    sys.setprofile(None)
print(*sorted(found))
"""
SHORT = 8  # lines: a function that short and used once may explain nothing

Arrows = Mapping[str, set[str]]
"""A module, or a room → what it imports."""


class Function(NamedTuple):
    """What a function asks of a reader."""

    name: str  # module.function
    lines: int
    parameters: int  # without self and cls


def module_of(path: Path, root: Path) -> str:
    """Return a file's module below jformer: data/plan.py is data.plan, the package itself is ''."""
    return ".".join(path.relative_to(root / "jformer").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room_of(module: str) -> str:
    """Return the folder, or the file, directly below jformer or jformer/tools: data/plan.py is in data."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "tools" else parts[0] or "__init__"


@functools.cache
def trees(root: Path) -> dict[str, ast.Module]:
    """Return module → its syntax tree, parsed once."""
    return {module_of(path, root): ast.parse(path.read_text()) for path in sorted((root / "jformer").rglob("*.py"))}


def imports(tree: ast.AST, nested: bool = True) -> Iterator[str]:
    """Yield the absolute name of everything imported; without `nested`, only what importing the module imports."""
    for node in ast.walk(tree) if nested else at_top(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_top(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from at_top(child)


def ours(tree: ast.AST, modules: Mapping[str, ast.Module]) -> set[str]:
    """Return the modules below jformer that are imported: `from jformer.training import optim` is 'training.optim'."""
    inner = {
        name.removeprefix("jformer").removeprefix(".") for name in imports(tree) if name.split(".")[0] == "jformer"
    }
    return {name if name in modules else name.rpartition(".")[0] for name in inner}


@functools.cache
def arrows_between_modules(root: Path) -> dict[str, set[str]]:
    """Return module → the modules it imports."""
    modules = trees(root)
    return {name: ours(tree, modules) - {name} for name, tree in modules.items()}


def arrows_between_rooms(root: Path) -> dict[str, set[str]]:
    """Return room → the other rooms it imports."""
    found: dict[str, set[str]] = {}
    for name, targets in arrows_between_modules(root).items():
        found.setdefault(room_of(name), set()).update({room_of(target) for target in targets} - {room_of(name)})
    return found


def floors(arrows: Arrows) -> list[set[str]]:
    """Return the members of each floor, which import only from lower ones; members of import cycles are on none."""
    found: list[set[str]] = []
    placed: set[str] = set()
    while free := {name for name, targets in arrows.items() if name not in placed and targets <= placed}:
        found.append(free)
        placed |= free
    return found


def in_circles(arrows: Arrows) -> set[str]:
    """Return the members of import cycles."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            new = arrows[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return {name for name in arrows if name in reached(name)}


def functions(root: Path) -> list[Function]:
    """Return every function and method, those inside others too."""
    return [
        Function(f"{module or 'jformer'}.{node.name}", (node.end_lineno or 0) - node.lineno + 1, parameters(node.args))
        for module, tree in trees(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(arguments: ast.arguments) -> int:
    """Return how many parameters a function has; *args and **kwargs are one each."""
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return len([each for each in named if each and each.arg not in ("self", "cls")])


def lines_of(root: Path, *folders: str) -> dict[str, int]:
    """Return file → its lines, of the Python files below folders."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in paths}


def words(root: Path) -> int:
    """Return how many words the documents have, decision records and the lab book among them."""
    paths = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "experiments").rglob("*.md")]
    return sum(len(path.read_text().split()) for path in paths)


def loaded(root: Path, module: str) -> set[str]:
    """Return the modules of ours that importing one loads, in a process of its own."""
    program = f"import sys, {module}; print(*(name for name in sys.modules if name.partition('.')[0] == 'jformer'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def on_the_path(root: Path) -> list[str]:
    """Return the files that a reader opens between a line of text and its translation, models left out."""
    done = subprocess.run([sys.executable, "-c", PATH], cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.split()


def duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once, except those that Python prescribes."""
    return sorted(name for name, number in Counter(names).items() if number > 1 and not name.startswith("__"))


def used_once(root: Path) -> list[Function]:
    """Return the functions whose name is read at one place of the package; `f()` and `x.f` both read f."""
    read: Counter[str] = Counter()
    for tree in trees(root).values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                read[node.id if isinstance(node, ast.Name) else node.attr] += 1
    return [each for each in functions(root) if read[each.name.rpartition(".")[2]] == 1]


def sizes(root: Path) -> dict[str, str]:
    """Return the lines of code and the words of documents."""
    package = lines_of(root, "jformer")
    tools = {name for name in package if name.startswith("jformer/tools/")}
    core = sum(lines for name, lines in package.items() if name not in tools)
    others = {folder: sum(lines_of(root, folder).values()) for folder in ("tests", "experiments", "configs")}
    table = {"core": core, "tools": sum(map(package.__getitem__, tools)), **others}
    found = {name: f"{lines:,} lines" for name, lines in table.items()}
    return {**found, "documents": f"{words(root):,} words"}


def names_and_functions(root: Path) -> dict[str, str]:
    """Return the names that occur twice, and what is long, wide or used once."""
    package, measured, once = lines_of(root, "jformer"), functions(root), used_once(root)
    longest, widest = max(measured, key=lambda f: f.lines), max(measured, key=lambda f: f.parameters)
    middle = statistics.median(package.values()), statistics.median(f.lines for f in measured)
    classes = (node.name for tree in trees(root).values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    twice = duplicates(Path(name).stem for name in package), duplicates(classes)
    short = sum(each.lines <= SHORT for each in once)
    return {
        "duplicate modules": f"{len(twice[0])}: {', '.join(twice[0])}",
        "duplicate classes": f"{len(twice[1])}: {', '.join(twice[1])}",
        "used once": f"{len(once):,} of {len(measured):,} functions, {short} of them of {SHORT} lines or fewer",
        "longest file": f"{max(package, key=package.__getitem__)}, {max(package.values())} lines; "
        f"the median has {middle[0]:.0f}",
        "longest function": f"{longest.name}, {longest.lines} lines; the median has {middle[1]:.0f}",
        "most parameters": f"{widest.name}, {widest.parameters}",
    }


def structure(root: Path) -> dict[str, str]:
    """Return rooms, floors and arrows, what three entries of the package load, and what answering a text runs."""
    rooms, modules, path = arrows_between_rooms(root), arrows_between_modules(root), on_the_path(root)
    loads = {name: loaded(root, entry) for name, entry in ENTRIES.items()}
    lengths = {
        f"jformer.{module_of(root / name, root)}".rstrip("."): n for name, n in lines_of(root, "jformer").items()
    }
    return {
        "rooms": f"{len(rooms)} on {len(floors(rooms))} floors, with {len(modules)} files",
        "arrows": f"{count(rooms)} between rooms, {count(modules)} between files",
        "in circles": f"{len(in_circles(rooms))} rooms, {len(in_circles(modules))} files",
        **{
            f"the {name} loads": f"{len(found)} modules of {sum(map(lengths.__getitem__, found)):,} lines"
            for name, found in loads.items()
        },
        "text to answer": f"{len(path)} files: {', '.join(path)}",
    }


def main(argv: list[str]) -> None:
    """Print the figures."""
    del argv
    root = Path(CHECKOUT.value).resolve()
    table = sizes(root)
    if not smoke_sizes():  # parses every file, and imports the package three times
        table |= structure(root) | names_and_functions(root)
    for name, figure in table.items():
        print(f"{name:<20}{figure}")
    if FILES.value:
        for module, tree in trees(root).items():
            print(f"{module or 'jformer':<40}{(ast.get_docstring(tree) or '').partition(chr(10))[0]}")


def count(arrows: Arrows) -> int:
    """Return how many arrows there are."""
    return sum(map(len, arrows.values()))


if __name__ == "__main__":
    app.run(main)
