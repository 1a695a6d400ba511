"""Figures of attention: their panels are where they belong, and their tokens are texts."""

import io
import xml.etree.ElementTree

import numpy as np
import pytest
from PIL import Image

from jformer.errors import UserError
from jformer.inference.answers import Attended, AttentionWeights, Part
from jformer.tools.pages import heatmaps


def attended(*parts, layers=2, heads=3, rows=("<b>", "$x^2$"), columns=("a", "b", "c")):
    values = np.zeros((layers, heads, len(rows), len(columns)), np.float32)
    values[..., 0] = 1.0
    mask = np.ones((len(rows), len(columns)), bool)
    names = {Part.ENCODER_SELF: "encoder", Part.DECODER_SELF: "decoder", Part.CROSS: "cross"}
    return Attended(
        "a b c", "x", **{names[part]: AttentionWeights(part, values, mask, rows, columns) for part in parts}
    )


def test_a_figure_has_a_panel_for_every_layer_and_head_and_its_tokens_are_texts():
    svg = heatmaps.draw(attended(Part.ENCODER_SELF, Part.CROSS), ".svg").decode()
    texts = [
        "".join(element.itertext())
        for element in xml.etree.ElementTree.fromstring(svg).iter()
        if element.tag.endswith("}text")
    ]
    titles = [text for text in texts if text.startswith("layer")]
    assert titles == [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3)]
    assert "cross-attention" in texts
    assert texts.count("<b>") == texts.count("$x^2$") == 2  # beside the first panel of each layer
    assert texts.count("a") == 3  # below the last panel of each head


def test_tokens_of_white_space_can_be_seen():
    assert "␣" in heatmaps.draw(attended(Part.CROSS, rows=(" ", "x")), ".svg").decode()


def test_what_is_attended_to_is_dark():
    picture = Image.open(io.BytesIO(heatmaps.draw(attended(Part.ENCODER_SELF, layers=1, heads=1), ".png"))).convert("L")
    pixels = np.asarray(picture).astype(int)
    middle = pixels[pixels.shape[0] // 2]
    dark = np.flatnonzero(middle < 100)
    assert 0.15 < len(dark) / len(middle) < 0.4  # one of three columns, beside the labels
    assert dark.mean() < len(middle) * 0.6


def test_a_figure_is_the_same_every_time():
    assert heatmaps.draw(attended(Part.CROSS), ".svg") == heatmaps.draw(attended(Part.CROSS), ".svg")


def test_what_cannot_be_drawn_is_one_line():
    with pytest.raises(UserError, match="has no attention to draw"):
        heatmaps.draw(attended(), ".png")
    with pytest.raises(UserError, match="2 x 3 panels of 80 x 1 inches are too many for a figure"):
        heatmaps.draw(attended(Part.CROSS, rows=("x",) * 500), ".png")


def test_masked_pairs_are_hatched_and_explained():
    found = attended(Part.DECODER_SELF, rows=("a", "b"), columns=("a", "b"))
    assert "masked" not in heatmaps.draw(found, ".svg").decode()
    causal = found.decoder._replace(mask=np.tri(2, dtype=bool))
    svg = heatmaps.draw(found._replace(decoder=causal), ".svg").decode()
    assert "masked: may not attend" in svg
    assert svg.count("fill: url(#") == 7  # of two layers with three heads, and of what explains it


def test_patches_are_drawn_over_the_picture():
    """A class token that takes all from the last patch: it is orange, and the others are gray."""
    weights = np.zeros((1, 1, 5, 5), np.float32)
    weights[..., 4] = 1
    names = ("class", "1,1", "1,2", "2,1", "2,2")
    part = AttentionWeights(Part.ENCODER_SELF, weights, np.ones((5, 5), bool), names, names)
    image = np.full((4, 4, 1), 128, np.uint8)
    picture = Image.open(io.BytesIO(heatmaps.draw(Attended("x", "", part, image=image), ".png"))).convert("RGB")
    colors = np.asarray(picture).astype(int)
    orange = np.argwhere(colors[..., 0] - colors[..., 2] > 60)
    gray = np.argwhere((np.ptp(colors, axis=-1) == 0) & (abs(colors[..., 0] - 128) < 10))
    assert len(gray) > 2 * len(orange) > 0
    assert (orange.min(axis=0) > gray.min(axis=0)).all()


def test_of_a_caption_every_word_has_a_picture():
    names = ("1,1", "1,2", "2,1", "2,2")
    part = AttentionWeights(
        Part.CROSS, np.full((2, 3, 3, 4), 0.25, np.float32), np.ones((3, 4), bool), ("a", "$b", "c"), names
    )
    svg = heatmaps.draw(Attended("x", "", cross=part, image=np.zeros((4, 4, 3), np.uint8)), ".svg").decode()
    texts = [
        "".join(each.itertext()).strip()
        for each in xml.etree.ElementTree.fromstring(svg).iter()
        if each.tag.endswith("}text")
    ]
    assert [text for text in texts if text in ("a", "$b", "c")] == ["a", "$b", "c"]
    assert texts.count("most 0.25") == 3
