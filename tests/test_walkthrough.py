"""docs/walkthrough.md prints what it says.

`JAX_PLATFORMS=cpu python -m tests.test_walkthrough` writes its outputs anew.
"""

import contextlib
import difflib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "walkthrough.md"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL)


def rerun(page):
    """Return the page with the output of its blocks, run in order in one namespace."""
    names = {}

    def run(block):
        code, printed = block["code"], io.StringIO()
        above = "\n" * page.count("\n", 0, block.start("code"))  # so that a traceback names the page's line
        with contextlib.redirect_stdout(printed):
            exec(compile(above + code, PAGE, "exec"), names)
        output = f"\n```text\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{code}```\n{output}"

    return BLOCK.sub(run, page)


def test_every_block_prints_what_the_page_shows():
    page = PAGE.read_text(encoding="utf-8")
    printed = rerun(page)
    if printed != page:
        diff = difflib.unified_diff(page.splitlines(), printed.splitlines(), "the page", "what it prints", lineterm="")
        pytest.fail("docs/walkthrough.md is not what its blocks print:\n" + "\n".join(diff), pytrace=False)


if __name__ == "__main__":
    PAGE.write_text(rerun(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
