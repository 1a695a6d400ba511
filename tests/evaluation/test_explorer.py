"""The page of attention, in a browser where there is one: what it draws, and that texts stay texts."""

import re

import numpy as np
import pytest
from etils.epath import Path

from jformer.errors import UserError
from jformer.evaluation import explorer
from jformer.inference.attention import Attended, Choice, Part, Weights
from tests import browser
from tests.browser import HOSTILE


def example():
    rows, columns = ("ein", HOSTILE, "</s>"), ("a", HOSTILE)
    values = np.full((2, 3, 3, 2), 0.5, np.float32)
    own = np.eye(2, dtype=np.float32)[None, None].repeat(2, 0)
    weights = (
        Weights(Part.CROSS, values, rows, columns),
        Weights(Part.ENCODER_SELF, own, columns, columns),
    )
    choices = tuple(Choice(token, 0.9, ((token, 0.9), (HOSTILE, 0.05))) for token in rows)
    return Attended(HOSTILE, "ein", weights, choices)


@pytest.fixture(scope="module")
def drawn():
    return browser.draw(explorer.explorer_page(f"Attention of {HOSTILE}", [example(), example()]))


def test_every_head_and_the_mean_of_each_layer_can_be_chosen(drawn):
    labels = re.findall(r'<button class="head"[^>]*aria-label="([^"]*)"', drawn.html)
    assert labels == [
        f"layer {layer}, {head}"
        for layer in (1, 2)
        for head in ("mean", *(f"head {i}, entropy 0.69" for i in (1, 2, 3)))
    ]
    assert "ein takes 0.502 from a" in drawn.html


def test_texts_stay_texts_and_nothing_goes_wrong(drawn):
    assert drawn.console == []
    assert "<title>Attention of &lt;/script&gt;" in drawn.html
    body = drawn.html.partition("<main")[2].partition("</main>")[0]
    assert "onerror" in body
    assert "<img" not in body


def test_the_page_asks_for_nothing():
    page = explorer.explorer_page("x", [example()])
    assert not re.search(r"(src|href)=\"?https?:|@import|url\(", page)
    assert "default-src 'none'" in page
    assert page.count("<script") == 2


def test_every_part_has_its_name():
    assert re.findall(r'"name":"([^"]*)"', explorer.explorer_page("x", [example()])) == [
        "cross-attention",
        "encoder self-attention",
    ]


def test_what_is_no_number_is_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        explorer.explorer_page("x", [example()._replace(choices=(Choice("a", float("nan"), ()),))])


def test_lines_are_sources_or_sources_with_targets(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(explorer, "load", lambda workdir, config: "run")
    monkeypatch.setattr(explorer, "attention_maps", lambda run, pairs: asked.extend(pairs) or [example()])
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfa b\r\nc\td e\r\n\r\n\xff\n")
    said = explorer.explore(None, Path("runs/x"), str(tmp_path / "in.txt"), str(tmp_path / "out.html"))
    assert asked == [("a b", None), ("c", "d e"), ("\ufffd", None)]
    assert capsys.readouterr().err.startswith(f"{tmp_path}/in.txt:4: invalid UTF-8")
    assert said.startswith(f"{tmp_path}/out.html: 1 example, ")
    assert "Attention of x" in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("a\n", "-", "name a file as --output"),
        ("\n", "out.html", "has 0 lines to explore: give 1 to 50"),
        (51 * "a\n", "out.html", "has 51 lines to explore"),
        (None, "out.html", "in.txt: No such file"),
        ("a\n", "nowhere/out.html", "--output=nowhere/out.html: cannot be written; name a file"),
        ("a\n", ".", "--output=.: cannot be written; name a file"),
    ],
)
def test_what_cannot_be_explored_is_refused(tmp_path, text, output, message):
    if text is not None:
        (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        explorer.explore(None, Path("runs/x"), str(tmp_path / "in.txt"), output)


def test_a_figure_of_another_kind_is_refused_before_the_run_is_read(tmp_path):
    with pytest.raises(UserError, match=r"figure\.pdf: a page ends in \.html, a figure in \.png or \.svg"):
        explorer.explore(None, Path(tmp_path / "none"), "-", str(tmp_path / "figure.pdf"))
