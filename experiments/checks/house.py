"""How large is the house? Rooms, floors, arrows and circles of jformer, and its longest, from the sources alone.

Command:  python -m experiments.checks.house [--root=ANOTHER_CHECKOUT] [--smoke]
"""

import ast
import functools
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from experiments.measure import smoke_sizes

CHECKOUT = flags.DEFINE_string("root", str(Path(__file__).parents[2]), "The checkout to measure.")

Arrows = Mapping[str, set[str]]
"""A module, or a room → what it imports."""


class Function(NamedTuple):
    """What a function takes of a reader."""

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
    """Return what lies on each floor: what it imports lies lower. What imports each other in a circle is on none."""
    found: list[set[str]] = []
    placed: set[str] = set()
    while free := {name for name, targets in arrows.items() if name not in placed and targets <= placed}:
        found.append(free)
        placed |= free
    return found


def in_circles(arrows: Arrows) -> set[str]:
    """Return what imports itself by way of others."""

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


def file_lengths(root: Path) -> dict[str, int]:
    """Return file → its lines, of the package, its configs and its experiments."""
    paths = [path for folder in ("jformer", "configs", "experiments") for path in sorted((root / folder).rglob("*.py"))]
    return {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in paths}


def main(argv: list[str]) -> None:
    """Print the figures."""
    del argv
    root = Path(CHECKOUT.value).resolve()
    lengths = file_lengths(root)
    own = {name: lines for name, lines in lengths.items() if name.startswith("jformer/")}
    if smoke_sizes():
        print(f"{len(own)} files of {sum(own.values()):,} lines\nwithout what takes reading them as Python")
        return
    rooms, modules, measured = arrows_between_rooms(root), arrows_between_modules(root), functions(root)
    longest, widest = max(measured, key=lambda f: f.lines), max(measured, key=lambda f: f.parameters)
    middle = statistics.median(own.values()), statistics.median(f.lines for f in measured)
    table = {
        "rooms": f"{len(rooms)}, with {len(modules)} files of {sum(own.values()):,} lines",
        "floors": f"{len(floors(rooms))}",
        "arrows": f"{count(rooms)} between rooms, {count(modules)} between files",
        "in circles": f"{len(in_circles(rooms))} rooms, {len(in_circles(modules))} files",
        "longest file": f"{max(own, key=own.__getitem__)}, {max(own.values())} lines; the median has {middle[0]:.0f}",
        "longest function": f"{longest.name}, {longest.lines} lines; the median has {middle[1]:.0f}",
        "most parameters": f"{widest.name}, {widest.parameters}",
    }
    for name, figure in table.items():
        print(f"{name:<18}{figure}")


def count(arrows: Arrows) -> int:
    """Return how many arrows there are."""
    return sum(map(len, arrows.values()))


if __name__ == "__main__":
    app.run(main)
