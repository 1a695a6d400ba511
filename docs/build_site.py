"""Build the site of these documents: the pages, every option from its dataclass, the library from its docstrings.

Command:  pip install -e ".[docs]" -c constraints.txt && python docs/build_site.py --output=site

Pages keep their places, so that their links lead on the site where they lead in the repository; what they link to that
is no page is copied as it is. A link that leads nowhere ends the build.
"""

import argparse
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from option_table import options_page

from jformer.config import default_config, resolve
from jformer.tools.pages.gallery import gallery

ROOT = Path(__file__).resolve().parents[1]
OPTIONS, LIBRARY, GALLERY = "docs/options.md", "docs/api.md", "docs/gallery.md"  # the generated pages
GALLERY_FILE = "gallery_page.html"
GALLERY_PAGE = f"""# The gallery

What `python -m jformer.main --mode=gallery --output=gallery.html` writes ([pages.md](pages.md#the-gallery)), for the
base model of Vaswani et al. 2017; [alone in a window]({GALLERY_FILE}).

<iframe src="{GALLERY_FILE}" title="The gallery" style="width: 100%; height: 60em"></iframe>
"""
NOTEBOOKS = ("docs/first_translation.md", "docs/look_inside.md", "docs/training_loop.md")
CELL = re.compile(r"^```(python|bash)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
NAVIGATION = {
    "Begin": [
        "README.md",
        *NOTEBOOKS,
        "docs/results.md",
        "docs/claims.md",
        "docs/coming_from.md",
        "docs/tutorials.md",
        "docs/walkthrough.md",
        GALLERY,
        "docs/tasks.md",
        "docs/recipes.md",
    ],
    "Use": ["docs/guide.md", "docs/pages.md", "docs/library.md", "docs/parts.md", "docs/weights.md", "docs/serving.md"],
    "Scale": ["docs/performance.md", "docs/processes.md", "docs/scaling.md", "docs/tpu.md", "docs/reliability.md"],
    "Look up": [OPTIONS, LIBRARY, "docs/reference.md", "docs/glossary.md"],
    "Lab book": [
        "experiments/README.md",
        "experiments/papers/README.md",
        "experiments/speed/README.md",
        "experiments/speed/programs.md",
        "experiments/faults/README.md",
        "experiments/checks/README.md",
    ],
    "Decisions": [f"docs/decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))],
    "Take part": ["docs/map.md", "CONTRIBUTING.md", "docs/stability.md", "SECURITY.md", "CHANGELOG.md"],
}
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|<img src=\"([^\"]+)\"")


def main() -> None:
    """Build it, or say what is missing."""
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output
    if output.exists() and any(output.iterdir()):
        sys.exit(f"--output={output} is not empty: name a new directory")
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        collect(project / "pages")
        (project / "zensical.toml").write_text(settings())
        try:
            subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=project, check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"the site was not built (exit code {error.returncode}); it needs zensical, of the extra docs")
        shutil.copytree(project / "site", output, dirs_exist_ok=True)
    print(f"{output}/index.html: {len(list(output.rglob('*.html')))} pages")


def collect(pages: Path) -> None:
    """Put all pages into a folder, and all files that they link to."""
    for section in NAVIGATION.values():
        for page in section:
            if page not in (OPTIONS, LIBRARY, GALLERY):
                copy(ROOT / page, pages)
    for name in NOTEBOOKS:
        copied = pages / name
        copied.with_suffix(".ipynb").write_text(notebook(copied.read_text()))
        copied.write_text(copied.read_text() + f"\n[This page as a notebook]({copied.stem}.ipynb).\n")
    (pages / OPTIONS).write_text(options_page())
    (pages / LIBRARY).write_text(library_page())
    (pages / GALLERY).write_text(GALLERY_PAGE)
    (pages / GALLERY).with_name(GALLERY_FILE).write_text(gallery(resolve(default_config())))


def copy(page: Path, pages: Path) -> None:
    """Copy a page, and what it links to: a page with all that it links to, a file, or the files of a folder."""
    target = pages / page.relative_to(ROOT)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(page, target)
    if page.suffix != ".md":
        return
    for match in LINK.finditer(page.read_text()):
        place = match[1] or match[2]
        linked = (page.parent / place).resolve()
        if "://" in place or not linked.is_relative_to(ROOT):
            continue
        for file in [linked] if linked.is_file() else linked.glob("*.*"):
            copy(file, pages)


def notebook(text: str) -> str:
    """Return a page as a notebook, as Jupytext makes it of Markdown: blocks of Python and bash are cells of code."""

    def cell(kind: str, source: str, **more: object) -> dict[str, object]:
        return {"cell_type": kind, "metadata": {}, "source": source.strip().splitlines(keepends=True), **more}

    cells, begin = [], 0
    for block in CELL.finditer(text):
        code = "%%bash\n" + block[2] if block[1] == "bash" else block[2]
        cells += [cell("markdown", text[begin : block.start()]), cell("code", code, execution_count=None, outputs=[])]
        begin = block.end()
    cells.append(cell("markdown", text[begin:]))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    content = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "accelerator": "GPU"},
        "nbformat": 4,
        "nbformat_minor": 4,
    }
    return json.dumps(content, ensure_ascii=False, indent=1)


def settings() -> str:
    """Return the settings of the site: it asks for nothing from elsewhere, fonts included."""
    sections = [f"{{ {json.dumps(title)} = {json.dumps(pages)} }}" for title, pages in NAVIGATION.items()]
    return "\n".join(
        [
            "[project]",
            'site_name = "jformer"',
            'docs_dir = "pages"',
            'site_dir = "site"',
            "use_directory_urls = false",
            f"nav = [{', '.join(sections)}]",
            "[project.theme]",
            "font = false",
            'features = ["content.code.copy", "search.highlight"]',
            "",
        ]
    )


def library_page() -> str:
    """Return what `import jformer` gives, and the methods of what it returns, with their docstrings."""
    import jformer

    predictor = importlib.import_module("jformer.inference.predict").Predictor
    methods = [name for name in vars(predictor) if not name.startswith("_") and callable(getattr(predictor, name))]
    parts = ["# Library", inspect.cleandoc(jformer.__doc__ or "")]
    public = [(f"jformer.{name}", getattr(jformer, name)) for name in jformer.__all__ if not name.startswith("_")]
    for name, thing in [*public, *((f"Predictor.{name}", getattr(predictor, name)) for name in methods)]:
        parts += [f"## {name}", f"```python\n{name}{signature(thing)}\n```", inspect.cleandoc(thing.__doc__ or "")]
    return "\n\n".join(parts) + "\n"


def signature(thing: Any) -> str:
    """Return what it is called with; "" of an exception, which is caught and not called."""
    return "" if inspect.isclass(thing) and issubclass(thing, BaseException) else str(inspect.signature(thing))


if __name__ == "__main__":
    main()
