"""What the whole session is told of single tests is still true of them."""

import re
from pathlib import Path

import pytest

from tests.conftest import LONGEST, SLOW

TESTS = Path(__file__).parent
FILES = {path.stem: "".join(map(Path.read_text, TESTS.rglob(path.name))) for path in TESTS.rglob("test_*.py")}
PRESETS = TESTS.parent / "jformer" / "config" / "presets.py"


@pytest.mark.parametrize("stem", SLOW)
def test_slow_tests_are_named_as_they_are(stem):
    there = FILES[stem] + PRESETS.read_text()
    gone = {word for word in re.findall(r"[a-z_]{5,}", SLOW[stem]) if word not in there}
    assert not gone, f"tests/conftest.py: {stem}.py has no test, and no case, of that name"


def test_the_longest_files_are_there():
    assert FILES.keys() >= set(LONGEST)
