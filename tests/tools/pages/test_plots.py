"""Pictures that can be read, and pages that run nothing."""

import base64
import io
import re
import subprocess
import sys
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from jformer.errors import UserError
from jformer.tools.pages import page, plots
from jformer.tools.pages.plots import OTHERS_COLOR, PALETTE, PlottedLine

LONG = "warmup_steps=4000, normalisation=post, optimizer=adafactor, " * 4 + "x" * 50
EVIL = '<script>alert(1)</script>\'& " onload="alert(1)'


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def ink(png, colour):
    """Return how many pixels have about that colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(pixels(png) - wanted).max(axis=-1) < 16).sum())


def some_lines(count, label="arm"):
    x = [1, 2, 4, 8]
    return [PlottedLine(f"{label} {i}", x, [3 + i % 7 - x_ / 10 + i / 99 for x_ in x], [0.1] * 4) for i in range(count)]


def draw(kind, count, label="arm"):
    count = min(count, 24) if kind == "bars" else count
    lines = some_lines(count, label)
    labels, means = [line.label for line in lines], [line.y[0] for line in lines]
    if kind == "bars":
        return plots.bars(labels, [PlottedLine("", range(count), means, [0.1] * count)], label, label)
    if kind == "intervals":
        rows = {line.label: (line.y[0], None if i % 2 else 0.1) for i, line in enumerate(lines)}
        return plots.intervals(rows, label, 3.0)
    return getattr(plots, kind)(lines, label, label)


KINDS = ("curves", "lines", "bars", "intervals")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "label"), [(6, LONG), (1000, "arm"), (2, "$x^$ _\n\0 Größe 汉")])
def test_pictures_are_small_as_wide_as_a_page_and_nothing_is_cut_off(kind, count, label):
    png = draw(kind, count, label)
    assert len(png) < 60_000
    image = pixels(png)
    assert 700 <= image.shape[1] <= 1000
    border = np.concatenate([image[:2].ravel(), image[-2:].ravel(), image[:, :2].ravel(), image[:, -2:].ravel()])
    assert border.min() > 240  # ink that went on past the edge would lie on it


@pytest.mark.parametrize("kind", ["curves", "lines", "intervals"])
def test_of_many_the_first_are_in_colour_and_the_rest_grey(kind):
    few, many = draw(kind, 4), draw(kind, 200)
    assert ink(many, OTHERS_COLOR) > 4 * ink(few, OTHERS_COLOR)
    if kind in ("curves", "lines"):
        assert all(ink(many, colour) > 20 for colour in PALETTE)
        assert not ink(few, PALETTE[4])


def test_what_is_not_finite_is_left_out():
    line = PlottedLine("a", [1, 2, 3], [2.0, float("inf"), float("nan")], [0.1, None, float("nan")])
    assert ink(plots.lines([line], "x", "y", logarithmic=True), PALETTE[0]) > 20
    assert ink(plots.curves([line._replace(y=[2.0, 1.0, float("inf")])], "x", "y"), PALETTE[0]) > 20
    plots.bars(["a", "b"], [PlottedLine("", [0, 1], [float("inf"), 1.0], [None, float("inf")])], "x", "y")
    plots.intervals({"a": (float("inf"), None), "b": (1.0, None)}, "loss", float("nan"))


def test_there_are_no_half_updates(monkeypatch):
    monkeypatch.setattr(plots, "_finished", lambda figure, axes, *_, **__: axes)
    ticks = plots.curves([PlottedLine("a", [20, 40], [3.0, 2.0], [None, None])], "updates", "loss").get_xticks()
    assert len(ticks) > 2
    assert [tick for tick in ticks if tick % 1] == []


def test_a_curve_of_one_point_is_seen():
    assert ink(plots.curves([PlottedLine("a", [20], [2.0], [None])], "x", "y"), PALETTE[0]) > 20


def test_a_picture_is_the_same_every_time():
    assert draw("curves", 5) == draw("curves", 5)


class Reader(HTMLParser):
    """Collects what a browser would see."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_data(self, data):
        self.words.append(data)


def test_a_page_is_whole_escaped_and_asks_for_nothing():
    png = draw("curves", 2)
    parts = [
        page.heading(EVIL),
        page.paragraph(EVIL),
        page.table([[EVIL, "n"], [EVIL, "3"]]),
        page.image(png, EVIL),
    ]
    text = page.page(EVIL, parts)
    reader = Reader(text)
    assert "script" not in reader.tags
    assert sum(EVIL in words for words in reader.words) == 6  # twice as the title
    assert [base64.b64decode(link.partition(",")[2]) for link in reader.links] == [png]
    assert not re.search("https?://|@import|url\\(", text)
    assert "default-src 'none'" in text
    assert "color-scheme: light dark" in text


def test_the_room_opens_at_once_and_says_what_plots_need():
    code = (
        "import sys; from jformer.tools.pages import plots; assert not {'matplotlib', 'numpy', 'jax'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_matplotlib_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"plots need matplotlib: pip install -e \"\.\[sweep\]\""):
        draw("curves", 2)


def test_a_name_that_begins_with_an_underscore_is_in_the_legend():
    names = [plots._label(name) for name in ("_base", "big")]
    _, axes = plt.subplots()
    for name in names:
        axes.plot([1], label=name)
    assert axes.get_legend_handles_labels()[1] == names
    plt.close()
