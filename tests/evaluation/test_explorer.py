"""The explorer's page, in a browser where there is one: what it draws, and that texts stay texts."""

import html
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from etils.epath import Path

from jformer.errors import UserError
from jformer.evaluation import explorer
from jformer.evaluation.explorer import Shown
from jformer.inference.answers import NODE_STATES, SearchTree
from jformer.inference.attended import Attended, Attention, Choice, Part
from jformer.inference.embeddings import Plane, Positions
from tests import browser
from tests.browser import HOSTILE


def example():
    rows, columns = ("ein", HOSTILE, "</s>"), ("a", HOSTILE)
    values = np.full((2, 3, 3, 2), 0.5, np.float32)
    own = np.eye(2, dtype=np.float32)[None, None].repeat(2, 0)
    cross = Attention(Part.CROSS, values, np.ones((3, 2), bool), rows, columns)
    encoder = Attention(Part.ENCODER_SELF, own, np.ones((2, 2), bool), columns, columns)
    choices = tuple(Choice(token, 0.9, ((token, 0.9), (HOSTILE, 0.05))) for token in rows)
    near = tuple(((HOSTILE, 0.25), ("b", -0.1)) for _ in columns)
    plane = Plane("embeddings", columns, np.array([[1, 0], [-1, 0.5]], np.float32), (0.8, 0.2), near)
    return Shown(Attended(HOSTILE, "ein", encoder, cross=cross, choices=choices), [search()], [plane])


def search():
    """Return a search of two beams and three steps, one of whose tokens is hostile."""
    return SearchTree(
        tokens=("", "ein", HOSTILE, "zwei", "</s>", "ein", "zwei", "</s>", "ein"),
        parents=np.array([-1, 0, 0, 0, 1, 1, 1, 2, 5], np.int32),
        log_probs=np.array([0, -0.1, -2, -3, -0.2, -1, -4, -0.5, -0.3], np.float32),
        scores=np.array([0, -0.1, -2, -3, -0.25, -1.1, -4.1, -2.25, -1.4], np.float32),
        states=("kept", "kept", "kept", "dropped", "ended", "kept", "dropped", "ended", "left"),
        ranks=np.array([0, 0, 0, 0, 1, 0, 0, 2, 0], np.int32),
    )


POSITIONS = (
    Positions("sinusoids", ("position", "feature"), np.array([[0, 1], [0.5, -2]], np.float32), ("1", "2"), ("1", "2")),
    Positions("ALiBi", ("head", "distance"), np.array([[-0.5, 0]], np.float32), ("1, slope 0.5",), ("-1", "0")),
)


@pytest.fixture(scope="module")
def page():
    return explorer.explorer_page(f"Attention of {HOSTILE}", [example(), example()], POSITIONS)


@pytest.fixture(scope="module")
def drawn(page):
    return browser.draw(page)


def section_of(drawn, name):
    return drawn.html.partition(f'<details id="{name}" open="">')[2].partition("</details>")[0]


def test_sections_are_drawn_when_they_are_opened(drawn):
    assert re.findall(r'<details id="(\w+)"><summary>[^<]*</summary><div></div>', drawn.html) == [
        "search",
        "embeddings",
        "positions",
    ]


def test_a_search_is_a_tree_whose_answer_is_marked(page):
    drawn = browser.draw(page, "search")
    assert drawn.console == []
    section = section_of(drawn, "search")
    assert re.findall(r'<g class="node ([^"]*)"', section) == [
        "kept answer", "kept answer chosen", "kept", "ended answer", "kept", "ended", "left",
    ]  # fmt: skip
    assert [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", section)] == [
        "ein", HOSTILE[:24], "1: </s> −0.250", "ein", "2: </s> −2.250", "ein …",
    ]  # fmt: skip
    assert "step 1, ein: probability 0.905 (−0.100 nats), sum −0.100; went on; on the way to the answer" in section
    assert "</s>: probability 0.819 (−0.200 nats), sum −0.300, score −0.250; ended with the end symbol, the answer" in (
        html.unescape(section)
    )
    assert "of 2 candidates the best of each step" in section
    rows = re.findall(r"<tr>(.*?)</tr>", section.partition("Hypotheses")[2])[1:]
    cells = [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]
    assert [row[:4] for row in cells] == [
        ["1", "ein </s>", "−0.300", "−0.250"],
        ["2", f"{HOSTILE} </s>", "−2.500", "−2.250"],
        ["", "ein ein ein", "−1.400", ""],
    ]
    assert cells[2][4] == NODE_STATES["left"]


def test_what_a_search_dropped_is_drawn_when_asked_for(page):
    clicking = "<script>setTimeout(() => document.getElementById('dropped0').click(), 500)</script></body>"
    open_to_programs = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    drawn = browser.draw(open_to_programs.replace("</body>", clicking), "search")
    assert section_of(drawn, "search").count('<g class="node dropped"') == 2


def test_of_what_was_dropped_the_page_has_the_best_of_each_step():
    tree = search()._replace(states=("kept", "kept", "dropped", "dropped", "ended", *["dropped"] * 3, "left"))
    data = json.loads(
        re.search(r'id="data">(.*?)</script>', explorer.explorer_page("x", [Shown(example().attended, [tree])]))[1]
    )
    (shown,) = data["examples"][0]["trees"]
    assert shown["dropped"] == 5
    names = list(NODE_STATES)
    assert [names[state] for state in shown["state"]] == ["kept", "kept", "dropped", "ended", "dropped", "left"]
    assert shown["score"] == [0, -100, -2000, -250, -1100, -1400]


def test_tokens_lie_as_their_embeddings_do(page):
    drawn = browser.draw(page, "embeddings")
    assert drawn.console == []
    section = html.unescape(section_of(drawn, "embeddings"))
    assert "which show 80 % and 20 % of their variance" in section
    assert section.count("<circle") == 2
    assert f"<td>a</td><td>{HOSTILE} 0.25 · b -0.10</td>" in section


def test_positions_are_maps_with_their_numbers(page):
    drawn = browser.draw(page, "positions")
    assert drawn.console == []
    section = section_of(drawn, "positions")
    assert re.findall(r"<h3>([^<]*)</h3>", section) == [
        "sinusoids: positions down, features across",
        "ALiBi: heads down, distances across",
    ]
    assert "position 1, feature 1: 0.0" in section
    assert "head 1, slope 0.5, distance -1: −0.50" in section
    assert section.count('role="application"') == 2


def test_a_part_that_an_example_lacks_is_not_offered():
    drawn = browser.draw(explorer.explorer_page("x", [Shown(example().attended)]))
    assert len(re.findall(r'<details id="\w+" hidden="">', drawn.html)) == 3
    assert drawn.console == []


def test_searches_are_shown_of_the_runs_own_answers(monkeypatch):
    asked = []
    decode = SimpleNamespace(search="beam", beam_size=2)
    run = SimpleNamespace(
        config=SimpleNamespace(decode=decode),
        task=SimpleNamespace(answer="text"),
        search_trees=lambda texts: asked.append(texts) or [[search()] for _ in texts],
    )
    monkeypatch.setattr(explorer, "embedding_planes", lambda predictor, pairs: [[] for _ in pairs])
    pairs, attended = [("a", "b"), ("c", None)], [example().attended] * 2
    shown = explorer.show(run, pairs, attended)
    assert asked == [["c"]]
    assert [len(each.trees) for each in shown] == [0, 1]
    decode.beam_size = 1
    assert [len(each.trees) for each in explorer.show(run, pairs, attended)] == [0, 0]


def test_every_head_and_the_mean_of_each_layer_can_be_chosen(drawn):
    labels = re.findall(r'<button class="head"[^>]*aria-label="([^"]*)"', drawn.html)
    assert labels == [
        f"{head}, layer {layer}"
        for layer in (1, 2)
        for head in ("mean", *(f"head {i} · 0.69 nats of entropy" for i in (1, 2, 3)))
    ]
    assert "ein takes 0.502 from a" in drawn.html


def test_texts_stay_texts_and_nothing_goes_wrong(drawn):
    assert drawn.console == []
    assert "<title>Attention of &lt;/script&gt;" in drawn.html
    body = drawn.html.partition("<main")[2].partition("</main>")[0]
    assert "onerror" in body
    assert "<img" not in body


def test_nothing_keeps_anybody_out(page):
    assert browser.barriers(page) == []


def test_everything_is_reached_and_used_by_keyboard(page):
    with browser.used(page) as tab:
        assert len(browser.tabbed(tab)) > 8
        before = tab.inner_text("#where")
        browser.go_to(tab, '.head[aria-pressed="false"]')
        tab.keyboard.press("Enter")
        assert tab.evaluate("() => document.activeElement.getAttribute('aria-pressed')") == "true"
        tab.wait_for_function("(before) => document.querySelector('#where').innerText !== before", arg=before)
        browser.go_to(tab, "#map svg")
        before = tab.inner_text("output")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text("output") != before
        browser.go_to(tab, "#search summary")
        tab.keyboard.press("Enter")
        browser.go_to(tab, "#search svg")
        chosen = tab.inner_text("#search output")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text("#search output") != chosen


def test_the_page_asks_for_nothing():
    page = explorer.explorer_page("x", [example()], POSITIONS)
    assert not re.search(r"(src|href)=\"?https?:|@import|url\(", page)
    assert "default-src 'none'" in page
    assert page.count("<script") == 2


def test_every_part_has_its_name():
    page = explorer.explorer_page("x", [Shown(example().attended)])
    assert re.findall(r'"name":"([^"]*)"', page) == [
        "cross-attention",
        "encoder self-attention",
    ]


def test_what_is_no_number_is_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        attended = example().attended._replace(choices=(Choice("a", float("nan"), ()),))
        explorer.explorer_page("x", [Shown(attended)])


def test_lines_are_sources_or_sources_with_targets(tmp_path, monkeypatch, capsys):
    asked = []
    run = SimpleNamespace(attend=lambda pairs: asked.extend(pairs) or [example().attended])
    monkeypatch.setattr(explorer, "load", lambda workdir, config: run)
    monkeypatch.setattr(explorer, "show", lambda run, pairs, attended: [example()])
    monkeypatch.setattr(explorer, "position_tables", lambda run, length: [])
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
