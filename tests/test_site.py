"""The site has a row for every option and a section for all that is public, and no link on it leads nowhere."""

import dataclasses
import html
import importlib
import json
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest

import jformer
from jformer.config.options import Config, flatten
from jformer.models.model_config import CHOICES
from tests.blocks import blocks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        return importlib.import_module("build_site")


@pytest.fixture(scope="module")
def table(site):
    """The cells of each row of the page of options, by its key."""
    rows = [
        re.split(r" (?<!\\)\| ", f" {row[2:-1]}") for row in site.options_page().splitlines() if row.startswith("| `")
    ]
    return {row[0].strip(" `"): [cell.strip().replace("\\|", "|") for cell in row[1:]] for row in rows}


def test_every_option_has_a_row_with_its_default_and_what_is_said_of_it(site, table):
    defaults = flatten(dataclasses.asdict(Config()))
    assert table.keys() == defaults.keys()
    assert {key: default for key, (default, *_) in table.items()} == {key: f"`{d!r}`" for key, d in defaults.items()}
    assert not [key for key, (_, _, words, _) in table.items() if not words]
    assert table["seed"][2] == "of parameters, dropout and the order of the data"
    assert "must exceed that of no answer" in table["decode.no_answer_threshold"][2]  # lines above it
    assert "whole run" in site.options_page()  # the docstring of a section


def test_options_with_few_values_have_those_that_the_check_takes(table):
    assert table["model.norm"][1] == ", ".join(f"`{choice!r}`" for choice in CHOICES["norm"])
    assert table["data.augment"][1].startswith("some of: `'flip'`")
    assert table["decode.search"][1] == "`'beam'`, `'sample'`, `'mbr'`"
    assert table["model.residual"][1] == "`True`, `False`"
    assert not table["data.dir"][1]
    assert sum(bool(choices) for _, choices, _, _ in table.values()) > 50


def test_papers_stand_in_a_column_of_their_own(table):
    assert table["model.norm_type"][3] == "Ba et al. 2016; Zhang and Sennrich 2019"
    assert (
        table["model.dropout"][3] == "Vaswani et al. 2017, section 5.4"
    )  # the section's paper, the field's place in it
    assert not table["train.samples"][3]
    assert table["model.norm"][3].startswith("post: Vaswani et al. 2017; pre: Xiong et al. 2020")  # where it is defined
    assert "noam: Vaswani et al. 2017, equation 3; t5: Raffel" in table["optim.schedule"][3]
    assert sum(bool(source) for *_, source in table.values()) >= 80


@pytest.mark.parametrize("key", ["norm", "positions", "init", "recurrent.cell"])
def test_choices_have_the_papers_of_all_that_one_defines(site, table, key):
    choices, source = table[f"model.{key}"][1], table[f"model.{key}"][3]
    named = re.findall(r"(\w+): ", source)
    left = [choice for choice in re.findall(r"'(\w+)'", choices) if choice not in named]
    assert left == (["none"] if key == "norm" else [])


def test_all_that_is_public_has_a_section(site):
    page = site.library_page()
    found = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert set(found) > {f"jformer.{name}" for name in jformer.__all__ if not name.startswith("_")}
    assert {"Predictor.predict", "Predictor.generate", "Predictor.score"} < set(found)
    assert "jformer.load(workdir" in page


def test_every_document_is_on_the_navigation(site):
    listed = {page for section in site.NAVIGATION.values() for page in section}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} < listed


@pytest.mark.slow
def test_pages_bring_what_they_link_to(site, tmp_path):
    site.collect(tmp_path)
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text()
    for linked in ("docs/attention.png", "configs/multi30k_tiny.py", "docs/decisions", site.OPTIONS, site.GALLERY):
        assert (tmp_path / linked).exists(), linked
    for page in site.NOTEBOOKS:
        cells = json.loads((tmp_path / page).with_suffix(".ipynb").read_text())["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        assert [each.removeprefix("%%bash\n") for each in code] == [block.code.strip() for block in blocks(page)]
        assert code[0].startswith("%%bash\npip install")
        assert cells[0]["source"][0].startswith("# ")


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
