"""The explorer's page, in a browser where there is one: what it draws, and that texts stay texts."""

import base64
import html
import json
import os
import re
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from etils.epath import Path

from jformer.decoding.decode_config import DecodeConfig
from jformer.errors import UserError
from jformer.inference.answers import NODE_STATES, Attended, AttentionWeights, Choice, Part, SearchTree
from jformer.tools.pages import explorer
from jformer.tools.pages.embedding_planes import Plane, Positions
from jformer.tools.pages.explorer import Shown
from jformer.tools.pages.page import pack
from tests import browser
from tests.browser import HOSTILE


def example():
    rows, columns = ("ein", HOSTILE, "</s>"), ("a", HOSTILE)
    values = np.full((2, 3, 3, 2), 0.5, np.float32)
    own = np.eye(2, dtype=np.float32)[None, None].repeat(2, 0)
    cross = AttentionWeights(Part.CROSS, values, np.ones((3, 2), bool), rows, columns)
    encoder = AttentionWeights(Part.ENCODER_SELF, own, np.ones((2, 2), bool), columns, columns)
    mask = np.tri(3, dtype=bool)
    decoder = AttentionWeights(Part.DECODER_SELF, (mask / mask.sum(-1, keepdims=True))[None, None], mask, rows, rows)
    choices = tuple(Choice(token, 0.9, ((token, 0.9), (HOSTILE, 0.05))) for token in rows)
    near = tuple(((HOSTILE, 0.25), ("b", -0.1)) for _ in columns)
    plane = Plane("embeddings", columns, np.array([[1, 0], [-1, 0.5]], np.float32), (0.8, 0.2), near)
    return Shown(Attended(HOSTILE, "ein", encoder, decoder, cross, choices), [search()], [plane])


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


def trees_of(page):
    """Return the searches of a page's first example, unpacked."""
    number = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["examples"][0]["trees"]
    return json.loads(zlib.decompress(base64.b64decode(re.findall("<!--(.*?)-->", page)[number])))


@pytest.fixture(scope="module")
def page():
    return explorer.explorer_page(
        f"Attention of {HOSTILE}", [example(), example()], POSITIONS, {"encoder": example().planes * 2}
    )


@pytest.fixture(scope="module")
def drawn(page):
    return browser.draw(page)


def section_of(drawn, name):
    return drawn.html.partition(f'<details id="{name}" open="">')[2].partition("</details>")[0]


def test_sections_are_drawn_when_they_are_opened(drawn):
    assert re.findall(r'<details id="(\w+)"><summary>[^<]*</summary><div></div>', drawn.html) == [
        "search",
        "embeddings",
        "contexts",
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
    assert "step 1, ein: probability 0.905 (−0.100 nats), sum −0.100; continued; on the way to the answer" in section
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
    (shown,) = trees_of(explorer.explorer_page("x", [Shown(example().attended, [tree])]))
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
    assert f'<td dir="auto">a</td><td dir="auto">{HOSTILE} 0.25 · b -0.10</td>' in section


@pytest.mark.slow
def test_a_slider_moves_tokens_in_context_through_the_layers():
    first, last = (example().planes[0]._replace(name=name, shares=shares) for name, shares in
                   {"input": (0.8, 0.2), "layer 1": (0.6, 0.1)}.items())  # fmt: skip
    with browser.used(explorer.explorer_page("x", [Shown(Attended("", ""))], (), {"encoder": [first, last]})) as tab:
        tab.click("#contexts summary")
        tab.wait_for_selector("#contexts circle")
        assert "layer 1" in tab.inner_text("#contexts h3")
        assert "60 % and 10 %" in tab.inner_text("#contexts p")
        tab.focus("#depth-encoder")
        tab.keyboard.press("ArrowLeft")
        assert tab.inner_text("#contexts h3") == "input"
        assert tab.get_attribute("#depth-encoder", "aria-valuetext") == "input"
        assert "80 % and 20 %" in tab.inner_text("#contexts p")


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
    assert len(re.findall(r'<details id="\w+" hidden="">', drawn.html)) == 4
    assert drawn.console == []


@pytest.mark.slow
def test_a_model_without_attention_shows_all_that_is_not_attention(page):
    shown = example()
    without = Shown(Attended("a", "ein", choices=shown.attended.choices), shown.trees, shown.planes)
    with browser.used(explorer.explorer_page("x", [without])) as tab:
        assert "There is no attention in this model." in tab.inner_text("#texts")
        assert not tab.is_visible("text=Layers and heads")
        assert not tab.is_visible("label[for=part]")
        assert tab.is_visible(f"text={explorer.WRITTEN}")
        browser.tabbed(tab)
    with browser.used(page) as tab:
        assert tab.is_visible("text=Layers and heads")
        assert "no attention" not in tab.inner_text("#texts")


def test_searches_are_shown_of_the_runs_own_answers(monkeypatch):
    asked = []
    run = SimpleNamespace(
        config=SimpleNamespace(decode=DecodeConfig(search="beam", beam_size=2)),
        task=SimpleNamespace(answer="text", restores=False),
        search_trees=lambda texts: asked.append(texts) or [[search()] for _ in texts],
    )
    monkeypatch.setattr(explorer, "embedding_planes", lambda predictor, pairs: [[] for _ in pairs])
    pairs, attended = [("a", "b"), ("c", None)], [example().attended] * 2
    shown = explorer.show(run, pairs, attended)
    assert asked == [["c"]]
    assert [len(each.trees) for each in shown] == [0, 1]
    assert [each.choices for each in shown] == [explorer.GIVEN, explorer.WRITTEN]
    for decode in (DecodeConfig(search="beam", beam_size=1), DecodeConfig(search="beam", beam_size=2, rerank="comet")):
        run.config.decode = decode
        assert [len(each.trees) for each in explorer.show(run, pairs, attended)] == [0, 0]
    run.task.answer = ""
    assert [each.choices for each in explorer.show(run, pairs[1:], attended[1:])] == [explorer.HIDDEN]
    run.task.answer = "tags"
    assert [each.choices for each in explorer.show(run, pairs, attended)] == [explorer.GIVEN_CHOICE, explorer.CHOSEN]


def test_tokens_of_white_space_can_be_seen():
    shown = example()
    cross = shown.attended.cross._replace(rows=(" ", "a b", "</s>"), columns=("\n", " "))
    choices = (Choice(" ", 0.9, ((" ", 0.9), ("\n", 0.05)), read=" "),)
    tree = search()._replace(tokens=("", " ", *search().tokens[2:]))
    plane = shown.planes[0]._replace(tokens=("\n", "a"), neighbours=(((" ", 0.5),), ()))
    page = explorer.explorer_page("x", [Shown(Attended("", "", cross=cross, choices=choices), [tree], [plane])])
    (data,) = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["examples"]
    (part,) = data["attention"]
    assert (part["rows"], part["columns"]) == (["␣", "a b", "</s>"], ["↵", "␣"])
    assert data["choices"] == [["␣", 0.9, [["␣", 0.9], ["↵", 0.05]], "␣"]]
    assert trees_of(page)[0]["tokens"][:2] == ["", "␣"]
    assert (data["planes"][0]["tokens"], data["planes"][0]["neighbours"][0]) == (["↵", "a"], [["␣", 0.5]])


def test_no_label_of_a_plane_covers_a_point_or_another_label():
    points = np.array([[0, 0], [0.25, 0], [0.5, 0.05], [0.5, -0.05], [9, 9]], np.float32)
    plane = Plane("p", ("one", "two", "three", "four", "five"), points, (0.8, 0.2), ((),) * 5)
    with browser.used(explorer.explorer_page("x", [Shown(Attended("", ""), planes=[plane])])) as tab:
        tab.click("#embeddings summary")
        tab.wait_for_selector("#embeddings circle")  # drawn by an event, not by the click
        boxes = """(name) => [...document.querySelectorAll(name)].map((each) => {
          const { left, right, top, bottom } = each.getBoundingClientRect();
          return [left, right, top, bottom];
        })"""
        labels, points = (tab.evaluate(boxes, f"#embeddings svg {name}") for name in ("text", "circle"))
    assert len(labels) == len(points) == 5
    for i, (left, right, top, bottom) in enumerate(labels):
        middles = [((a + b) / 2, (c + d) / 2) for a, b, c, d in points]
        assert not [point for point in middles if left < point[0] < right and top < point[1] < bottom]
        others = labels[:i] + labels[i + 1 :]
        assert not [o for o in others if o[0] < right and left < o[1] and o[2] + 4 < bottom and top + 4 < o[3]]


def test_every_head_and_the_mean_of_each_layer_can_be_chosen(drawn):
    labels = re.findall(r'<button class="head"[^>]*aria-label="([^"]*)"', drawn.html)
    assert labels == [
        f"{head}, layer {layer}"
        for layer in (1, 2)
        for head in ("mean", *(f"head {i} · 0.69 nats of entropy" for i in (1, 2, 3)))
    ]
    assert "ein takes 0.5 from a" in drawn.html
    assert "masked" not in drawn.html.partition('id="legend"')[2].partition("</output>")[0]


def test_texts_stay_texts_and_nothing_goes_wrong(drawn):
    assert drawn.console == []
    assert "<title>Attention of &lt;/script&gt;" in drawn.html
    body = drawn.html.partition("<main")[2].partition("</main>")[0]
    assert "onerror" in body
    assert "<img" not in body


def test_nothing_keeps_anybody_out(page):
    assert browser.barriers(page) == []


@pytest.mark.slow
def test_the_page_fits_a_phone_and_paper(page):
    wide = tuple(f"token{i}" for i in range(60))
    many = np.full((1, 6, 60, 60), 1 / 60, np.float32)
    own = AttentionWeights(Part.ENCODER_SELF, many, np.ones((60, 60), bool), wide, wide)
    assert browser.overhang(page) == (0, 0)
    assert browser.overhang(explorer.explorer_page("x", [Shown(Attended("a " * 99, "", own))], POSITIONS)) == (0, 0)


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
    assert not re.search(r"(src|href)=\"?https?:|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert re.findall(r"<script([^>]*)>", page) == [' type="application/json" id="data"', ""]


def test_what_is_packed_is_no_text_any_longer_once_the_page_is_read(page):
    assert len(re.findall("<!--[A-Za-z0-9+/]+=*-->", page)) == page.count("<!--") > 30
    with browser.used(page) as tab:
        tab.wait_for_function("() => packed.every((each) => each instanceof Uint8Array)")
        assert tab.evaluate("() => document.createTreeWalker(document, NodeFilter.SHOW_COMMENT).nextNode()") is None
        assert tab.evaluate("() => packed.length") == page.count("<!--")
        old = "Object.defineProperty(Uint8Array.prototype, 'setFromBase64', { value: undefined })"
        quick = "() => ['', 'AQ==', 'AQI=', 'AQID'].map((text) => [...bytes(text)])"
        assert tab.evaluate(quick) == [[], [1], [1, 2], [1, 2, 3]]
        tab.evaluate(f"() => {{ {old} }}")
        assert tab.evaluate(quick) == [[], [1], [1, 2], [1, 2, 3]]


def test_every_part_has_its_name():
    page = explorer.explorer_page("x", [Shown(example().attended)])
    assert re.findall(r'"name":"([^"]*)"', page) == [
        "cross-attention",
        "decoder self-attention",
        "encoder self-attention",
    ]


def test_what_is_no_number_is_never_written():
    with pytest.raises(ValueError, match="not JSON compliant"):
        attended = example().attended._replace(choices=(Choice("a", float("nan"), ()),))
        explorer.explorer_page("x", [Shown(attended)])


@pytest.mark.parametrize("restores", [False, True])
def test_lines_are_sources_or_sources_with_targets(restores, tmp_path, monkeypatch, capsys):
    asked, in_context = [], []
    attend = lambda pairs: asked.extend(pairs) or [example().attended]  # noqa: E731
    run = SimpleNamespace(
        attend=attend,
        task=SimpleNamespace(answer="text", restores=restores),
        pair_of=lambda line: (*line.split("\t"), None)[:2],
    )
    monkeypatch.setattr(explorer, "load", lambda workdir, config: run)
    monkeypatch.setattr(explorer, "show", lambda run, pairs, attended: [example()])
    monkeypatch.setattr(explorer, "position_tables", lambda run, length: [])
    monkeypatch.setattr(explorer, "context_planes", lambda run, pairs: in_context.extend(pairs) or {})
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfa b\r\nc\td e\r\n\r\n\xff\n")
    said = explorer.explore(None, Path("runs/x"), str(tmp_path / "in.txt"), str(tmp_path / "out.html"))
    assert asked == [("a b", None), ("c", "d e"), ("\ufffd", None)]
    answered = example().attended  # what was restored is no target of the line
    assert in_context == (asked if restores else [(answered.source, answered.target)])
    assert capsys.readouterr().err.startswith(f"{tmp_path}/in.txt:4: invalid UTF-8")
    assert said.startswith(f"{tmp_path}/out.html: 1 example, ")
    assert "Attention of x" in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "output", "message"),
    [
        ("a\n", "-", "name a file as --output"),
        ("\n", "out.html", "has 0 lines to explore: give 1 to 50"),
        (51 * "a\n", "out.html", "has 51 lines to explore"),
        ("a\nb\n", "out.svg", "has 2 lines to explore: give one, as out.svg is a figure"),
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


def test_no_page_takes_the_place_of_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "out.html")
    with pytest.raises(UserError, match=r"out\.html is not a plain file and would be replaced by one: name another"):
        explorer.explore(None, Path("runs/x"), "-", str(tmp_path / "out.html"))


@pytest.mark.parametrize(
    ("output", "form", "message"),
    [
        ("figure.pdf", None, r"figure\.pdf: a page ends in \.html, a figure in \.png or \.svg"),
        ("figure.png", "svg", r"figure\.png does not match --format=svg: leave one of them out"),
        ("page.html", "png", r"page\.html does not match --format=png"),
    ],
)
def test_a_figure_of_another_kind_is_refused_before_the_run_is_read(tmp_path, output, form, message):
    with pytest.raises(UserError, match=message):
        explorer.explore(None, Path(tmp_path / "none"), "-", str(tmp_path / output), form)


@pytest.mark.parametrize(
    ("output", "form", "begins"),
    [
        ("a.PNG", None, b"\x89PNG"),
        ("a", "png", b"\x89PNG"),
        ("a.figure", "svg", b"<?xml"),
        ("a.figure", "html", b"<!do"),
    ],
)
def test_the_format_is_that_of_the_flag_or_of_the_name(tmp_path, monkeypatch, output, form, begins):
    task = SimpleNamespace(answer="text", restores=False)
    run = SimpleNamespace(attend=lambda pairs: [example().attended], pair_of=lambda line: (line, None), task=task)
    monkeypatch.setattr(explorer, "load", lambda workdir, config: run)
    monkeypatch.setattr(explorer, "show", lambda run, pairs, attended: [example()])
    monkeypatch.setattr(explorer, "position_tables", lambda run, length: [])
    monkeypatch.setattr(explorer, "context_planes", lambda run, pairs: {})
    (tmp_path / "in.txt").write_text("a\n")
    explorer.explore(None, Path("runs/x"), str(tmp_path / "in.txt"), str(tmp_path / output), form)
    assert (tmp_path / output).read_bytes().startswith(begins)


def test_hidden_tokens_stand_beside_what_was_read_in_their_places():
    choice = Choice("a", 0.9, (("a", 0.9), (HOSTILE, 0.05)), read=HOSTILE)
    attended = example().attended
    drawn = browser.draw(
        explorer.explorer_page("x", [Shown(attended._replace(choices=(choice,)), choices=explorer.HIDDEN)])
    )
    assert drawn.console == []
    assert '<h2 id="chosen">What was hidden, and what it might be</h2>' in drawn.html
    assert f'<td dir="auto">{html.escape(HOSTILE, quote=False)}</td><td dir="auto">a</td>' in drawn.html
    assert drawn.html.count('<p class="text" dir="auto">') == 2
    assert '<th scope="col">read</th>' not in browser.draw(explorer.explorer_page("x", [Shown(attended)])).html


def test_a_masked_pair_looks_and_reads_unlike_a_weight_of_zero(page):
    with browser.used(page) as tab:
        tab.select_option("#part", "1")
        tab.wait_for_selector("#map path.masked", state="attached")
        assert "masked, no weight at all: may not attend (3 of 9 pairs)" in tab.inner_text("#legend")
        tab.focus("#map svg")
        tab.keyboard.press("ArrowRight")
        assert tab.inner_text("#attention output") == f"ein may not attend to {HOSTILE}: masked"
        hatched = tab.get_attribute("#map path.masked", "d")
        tab.select_option("#example", "1")  # keeps the part and the head: a word in another context
        tab.wait_for_function("() => document.querySelector('#attention output').textContent.includes('takes')")
        assert tab.input_value("#part") == "1"
        assert tab.inner_text("#where") == "decoder self-attention: layer 1, head 1"
    # The first row has two cells that are masked, the second one, the last none: a run of hatching each.
    assert [int(width) // 18 for width in re.findall(r"h(\d+)v", hatched)] == [2, 1]


def pictured():
    """Return what a caption's words take from an image of 2 by 2 patches: the first all of the last patch."""
    patches = ("1,1", "1,2", "2,1", "2,2")
    weights = np.array([[[[0, 0, 0, 1], [0.25] * 4]]], np.float32)
    cross = AttentionWeights(Part.CROSS, weights, np.ones((2, 4), bool), ("1,2", "</s>"), patches)
    own = AttentionWeights(
        Part.ENCODER_SELF, np.full((1, 1, 4, 4), 0.25, np.float32), np.ones((4, 4), bool), patches, patches
    )
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    return Attended("image.png", "1,2", own, None, cross, (), image)


@pytest.mark.slow
def test_patches_are_shown_over_the_picture():
    page = explorer.explorer_page("x", [Shown(pictured())])
    drawn = browser.draw(page)
    assert drawn.console == []
    shown = drawn.html.partition('id="lines"')[2].partition("</section>")[0]
    assert re.findall(r'aria-label="([^"]*)"', shown)[:3] == [
        "The image",
        told := "1,2 takes most from the patches 2,2 (1), 1,1 (0), 1,2 (0), by row and column",
        f"1,2: {told}",
    ]
    assert shown.count('<button class="head"') == 2  # a word and the end, though a word may look like a patch
    assert browser.barriers(page) == []
    with browser.used(page) as tab:
        tab.select_option("#part", "1")
        tab.wait_for_selector("text=1,1 takes most from the patches 1,1 (0.25), 1,2 (0.25), 2,1 (0.25)")
        assert tab.locator("#lines button").count() == 0


def test_small_weights_are_kept_apart():
    steps = explorer._steps(np.array([0.0, 1 / 512, 2 / 512, 0.5, 1.0], np.float32))
    np.testing.assert_allclose((steps / 255) ** 2, [0, 1 / 512, 2 / 512, 0.5, 1], atol=4e-3)
    assert len(set(steps.tolist())) == 5


def test_the_largest_page_asked_for_is_small():
    """512 tokens, of twelve layers and heads: one head here, and 144 times as much of noise would be under 60 MB."""
    scores = 2 * np.random.default_rng(0).normal(size=(512, 512))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert 144 * len(pack(explorer._steps(weights))) < 60e6
