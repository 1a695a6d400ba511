"""A name of the hub goes to the package that fetches, with patterns; a directory does not. No network here."""

import importlib
import sys
import types

import pytest

from jformer.errors import UserError
from jformer.tools.hf.hub import WANTED, find_model


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Put a package in the place of huggingface_hub, and return what it is asked for."""
    calls = []

    def snapshot_download(name, allow_patterns):
        if name == "nobody/nothing":
            raise RuntimeError("404 Client Error\nand a page of further words")
        calls.append((name, allow_patterns))
        return str(tmp_path / "snapshot")

    package = types.ModuleType("huggingface_hub")
    package.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    monkeypatch.chdir(tmp_path)
    return calls


def test_a_name_is_fetched_without_pickle(asked, tmp_path):
    assert find_model("Helsinki-NLP/opus-mt-en-de") == tmp_path / "snapshot"
    assert asked == [("Helsinki-NLP/opus-mt-en-de", list(WANTED))]
    assert not any("bin" in pattern for pattern in WANTED)


@pytest.mark.parametrize("given", ["./opus-mt-en-de", "opus", "/tmp/a/b", "a/b/c", "../a"])
def test_what_is_no_name_is_a_directory(asked, given):
    assert str(find_model(given)) == given.removeprefix("./")
    assert asked == []


def test_a_directory_of_that_name_comes_first(asked, tmp_path):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(find_model("owner/name")) == "owner/name"
    assert asked == []


def test_what_cannot_be_fetched_is_one_line(asked):
    with pytest.raises(UserError, match=r"^nobody/nothing: .*\(404 Client Error\); look at its name$"):
        find_model("nobody/nothing")


def test_a_missing_package_is_one_line(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    importlib.invalidate_caches()
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        find_model("owner/name")
