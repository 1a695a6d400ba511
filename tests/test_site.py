"""The site has a row for every option and a section for all that is public, and no link on it leads nowhere."""

import dataclasses
import html
import importlib.util
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

import jformer
from jformer.config.options import Config, flatten

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("jformer_site", ROOT / "docs" / "build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option_has_a_row_with_its_default_and_what_is_said_of_it(site):
    page = site.options_page()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", page, re.MULTILINE))
    defaults = flatten(dataclasses.asdict(Config()))
    assert rows.keys() == defaults.keys()
    assert all(rows[key].replace("\\|", "|") == repr(value) for key, value in defaults.items())
    assert "| `seed` | `0` | of parameters, dropout and the order of the data |" in page
    said = next(line for line in page.splitlines() if line.startswith("| `decode.no_answer_threshold`"))
    assert "must be so much above that of there being none" in said  # in the lines above the field
    assert "whole run" in page  # the docstring of a section


def test_all_that_is_public_has_a_section(site):
    page = site.library_page()
    found = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert set(found) > {f"jformer.{name}" for name in jformer.__all__ if not name.startswith("_")}
    assert {"Predictor.predict", "Predictor.generate", "Predictor.score"} < set(found)
    assert "jformer.load(workdir" in page


def test_every_document_is_on_the_navigation(site):
    listed = {page for section in site.NAVIGATION.values() for page in section}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} < listed


def test_pages_bring_what_they_link_to(site, tmp_path):
    site.collect(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    for linked in ("docs/attention.png", "configs/multi30k_tiny.py", "docs/decisions", site.OPTIONS, site.LIBRARY):
        assert (tmp_path / linked).exists(), linked


def test_the_site_is_built_and_no_link_leads_nowhere(tmp_path):
    pytest.importorskip("zensical", reason='the site needs: pip install -e ".[docs]" -c constraints.txt')
    command = [sys.executable, str(ROOT / "docs" / "build_site.py"), f"--output={tmp_path / 'site'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    asked = re.compile(r"""(?:src=|url\()["']?(?:https?:)?//|<link[^>]*href=["']?(?:https?:)?//""")
    assert not [str(page) for page in pages if asked.search(page.read_text())]  # nothing comes from elsewhere
    for page in set(pages) - {tmp_path / "site" / "404.html"}:  # whose links are those of the page that was asked for
        links = {html.unescape(link) for link in re.findall(r'(?:href|src)="?(?!https?:)([^":#> ]+)', page.read_text())}
        assert not [link for link in links if not (page.parent / urllib.parse.unquote(link)).exists()], page
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert "is not empty: name a new directory" in again.stderr
