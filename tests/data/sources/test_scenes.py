import functools
import re
from collections import Counter

import numpy as np
import pytest

from jformer.data import drawings
from jformer.data.data_config import SourceConfig
from jformer.data.drawings import COLOURS, EXAMPLE, Shape, caption_of, draw, name_of
from jformer.data.image_files import read_images
from jformer.data.sources import generated_cache as kept
from jformer.data.sources import open_split
from jformer.data.sources.scenes import build
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
        alone = [draw(f"scene:{part}") for part in pair.source.removeprefix("scene:").split(",")]
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
    forms = {form: int(draw(f"scene:large red {form} 16 16").any(axis=-1).sum()) for form in
             ("circle", "square", "triangle", "cross")}  # fmt: skip
    assert forms == {"circle": 69, "square": 81, "triangle": 41, "cross": 45}


def test_scenes_are_read_like_images():
    (image,) = read_images([EXAMPLE])
    np.testing.assert_array_equal(image, draw(EXAMPLE))


def test_other_drawings_are_another_corpus(monkeypatch):
    opened = functools.partial(open_split, SourceConfig(source="generated", name="scenes", num_pairs=10))
    monkeypatch.setattr(kept, "own_folder", lambda name: None)
    before = opened("valid").fingerprint
    assert before == opened("valid").fingerprint
    monkeypatch.setitem(drawings.SIZES, "small", 2.0)
    drawings.digest.cache_clear()
    assert opened("valid").fingerprint != before
    monkeypatch.undo()
    drawings.digest.cache_clear()
    assert opened("valid").fingerprint == before


@pytest.mark.parametrize("name", ["scene:", "scene:huge red circle 3 4", "scene:large red circle 3 32", "scene:17"])
def test_a_name_that_is_no_scene_is_refused_with_one_that_is(name):
    with pytest.raises(UserError, match=r"is no scene of 32 x 32 pixels; write it as 'scene:large red circle 6 5"):
        draw(name)


def test_all_splits_have_the_same_nineteen_words():
    words = [Counter(word for pair in pairs for word in pair.target.split()) for pairs in SPLITS.values()]
    assert set(words[0]) == set(words[1]) == set(words[2])
    assert len(words[0]) == 19
