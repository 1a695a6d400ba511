from collections import Counter

import numpy as np
import pytest
from PIL import Image

from jformer.data.data_config import SourceConfig
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with three images."""
    (tmp_path / "images").mkdir()
    for i in range(2):
        Image.fromarray(PIXELS + i).save(tmp_path / "images" / f"{i}.png")
    np.save(tmp_path / "more.npy", PIXELS[None])
    return tmp_path


def opened(folder, lines, split="train"):
    (folder / f"{split}.tsv").write_text("".join(f"{line}\n" for line in lines))
    return open_split(SourceConfig(source="captions", dir=str(folder)), split)


def read(folder, lines, split="train"):
    return list(opened(folder, lines, split).read(Counter()))


LINES = ["images/0.png\ta cat", "images/0.png\tone cat", "images/1.png\ta dog", "images/1.png\tdogs"]


def test_each_caption_is_an_example_of_training(folder):
    expected = [Pair(f"{folder}/{path}", text) for path, text in (line.split("\t") for line in LINES)]
    assert read(folder, LINES) == expected
    assert read(folder, ["more.npy#0\tnoise"]) == [Pair(f"{folder}/more.npy#0", "noise")]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_the_captions_of_an_image_are_its_references_in_evaluation(folder, split):
    assert read(folder, LINES, split) == [
        Pair(f"{folder}/images/0.png", "a cat", others=("one cat",)),
        Pair(f"{folder}/images/1.png", "a dog", others=("dogs",)),
    ]


def test_images_may_have_unlike_numbers_of_captions(folder):
    assert [len(pair.references) for pair in read(folder, LINES[:3], "valid")] == [2, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/0.png a cat", r"train\.tsv:2: 0 TABs; a line is the path of an image, one TAB, its caption$"),
        ("images/0.png\ta\tcat", r"train\.tsv:2: 2 TABs; a line is"),
        ("images/0.png\t ", r"train\.tsv:2: the caption of 'images/0\.png' is empty; write one, or remove the line$"),
        ("images/9.png\ta cat", r"train\.tsv:2: no image 'images/9\.png' in .*; paths are relative to that folder$"),
        (f"{'i' * 300}.png\ta cat", r"train\.tsv:2: no image 'iii"),
        ("\ta cat", r"train\.tsv:2: no image '' in"),
        ("images\ta folder", r"train\.tsv:2: no image 'images' in"),
    ],
)
def test_a_line_that_is_no_image_with_its_caption_is_named(folder, line, message):
    with pytest.raises(UserError, match=message):
        opened(folder, [LINES[0], line])


def test_the_fingerprint_is_that_of_captions_and_of_pixels(folder):
    first = opened(folder, LINES).fingerprint
    assert opened(folder, LINES).fingerprint == first
    assert opened(folder, [*LINES[:3], "images/1.png\ta bird"]).fingerprint != first
    Image.fromarray(PIXELS + 7).save(folder / "images" / "1.png")
    assert opened(folder, LINES).fingerprint != first


def test_the_fingerprint_does_not_depend_on_how_the_folder_is_written(folder, monkeypatch):
    first = opened(folder, LINES).fingerprint
    monkeypatch.chdir(folder)
    for spelling in (".", "./", "images/..", f"../{folder.name}"):
        assert open_split(SourceConfig(source="captions", dir=spelling), "train").fingerprint == first


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no split 'train': looked for train\.tsv"):
        open_split(SourceConfig(source="captions", dir=str(tmp_path)), "train")
