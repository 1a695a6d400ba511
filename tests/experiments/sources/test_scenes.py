import re
from collections import Counter

import numpy as np
import pytest

from experiments.sources import scenes
from experiments.sources.scenes import COLOURS, EXAMPLE, Shape, build, caption_of, draw, name_of
from jformer.data.data_config import SourceConfig
from jformer.data.image_files import read_images
from jformer.data.sources import generated_cache
from jformer.errors import UserError

SPLITS = build(3_000)


def content(name):
    """Return what a scene shows: each shape and its cell."""
    parts = re.findall(r"(\w+ \w+ \w+) (\d+) (\d+)", name)
    return frozenset((shape, int(x) * 3 // 32, int(y) * 3 // 32) for shape, x, y in parts)


def test_no_scene_of_a_split_shows_what_another_scene_does():
    shown = [content(pair.source) for pairs in SPLITS.values() for pair in pairs]
    assert [len(pairs) for pairs in SPLITS.values()] == [3_000, 1_000, 1_000]
    assert len(set(shown)) == len(shown) == 5_000


def test_held_out_scenes_do_not_depend_on_how_many_are_drawn():
    assert build(10)["test"] == SPLITS["test"]


def test_scenes_are_of_two_and_of_three_shapes_that_never_overlap():
    assert {pair.group for pair in SPLITS["test"]} == {"2 shapes", "3 shapes"}
    for pair in SPLITS["test"][:200]:
        alone = [draw(part) for part in pair.source.split(",")]
        whole = draw(pair.source)
        np.testing.assert_array_equal(sum(image.astype(int) for image in alone), whole)
        assert all(image.any() for image in alone)


def test_the_caption_of_a_scene_by_hand():
    red, blue = Shape("large", "red", "circle", 6, 5), Shape("small", "blue", "square", 16, 27)
    cross = Shape("large", "white", "cross", 27, 5)
    assert name_of((red, blue)) == EXAMPLE
    assert caption_of((red, blue)) == caption_of((blue, red)) == "a large red circle above a small blue square"
    expected = "a large red circle left of a large white cross and above a small blue square"
    assert caption_of((red, cross, blue)) == expected
    small = Shape("small", "red", "circle", 6, 5)
    assert caption_of((small, cross)) == "a large white cross right of a small red circle"
    assert caption_of((small, Shape("large", "green", "cross", 6, 26))) == (
        "a large green cross below a small red circle"
    )


def test_a_drawing_has_the_colours_where_the_name_says():
    image = draw(EXAMPLE)
    assert (image.shape, image.dtype) == ((32, 32, 3), np.uint8)
    assert tuple(image[5, 6]) == COLOURS["red"]
    assert tuple(image[27, 16]) == COLOURS["blue"]
    assert not image[16, 16].any()
    forms = {form: int(draw(f"large red {form} 16 16").any(axis=-1).sum()) for form in
             ("circle", "square", "triangle", "cross")}  # fmt: skip
    assert forms == {"circle": 69, "square": 81, "triangle": 41, "cross": 45}


def opened():
    return scenes.open_split(SourceConfig(source="experiments.sources.scenes:open_split", num_pairs=10), "train")


def test_scenes_are_read_as_images_of_an_array(tmp_path, monkeypatch):
    monkeypatch.setattr(scenes, "own_folder", lambda name: tmp_path)
    pairs = list(opened().read(Counter()))
    expected = build(10)["train"]
    assert [pair.target for pair in pairs] == [pair.target for pair in expected]
    for image, pair in zip(read_images(pair.source for pair in pairs), expected, strict=True):
        np.testing.assert_array_equal(image, draw(pair.source))
    assert len(list(tmp_path.iterdir())) == 1


def test_other_drawings_are_another_corpus(monkeypatch):
    monkeypatch.setattr(generated_cache, "own_folder", lambda name: None)
    before = opened().fingerprint
    assert before == opened().fingerprint
    monkeypatch.setitem(scenes.SIZES, "small", 2.0)
    scenes.digest.cache_clear()
    assert opened().fingerprint != before
    monkeypatch.undo()
    scenes.digest.cache_clear()
    assert opened().fingerprint == before


@pytest.mark.parametrize("name", ["", "huge red circle 3 4", "large red circle 3 32", "17"])
def test_a_name_that_is_no_scene_is_refused_with_one_that_is(name):
    with pytest.raises(UserError, match=r"is no scene of 32 x 32 pixels; write it as 'large red circle 6 5"):
        draw(name)


def test_all_splits_have_the_same_nineteen_words():
    words = [Counter(word for pair in pairs for word in pair.target.split()) for pairs in SPLITS.values()]
    assert set(words[0]) == set(words[1]) == set(words[2])
    assert len(words[0]) == 19
