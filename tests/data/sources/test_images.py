import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jformer.data import text
from jformer.data.data_config import SourceConfig
from jformer.data.image_files import open_array, read_images
from jformer.data.sources import open_split
from jformer.data.sources.split import Pair
from jformer.data.tokenizers import learn, load
from jformer.errors import UserError

ROOT = Path(__file__).parents[3]
GRAY = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (5, 4, 3, 3), np.uint8)
LABELS = ["cat", "dog", "cat", "a bird", "dog"]


def config(folder):
    return SourceConfig(source="images", dir=str(folder))


def read(folder, split="train"):
    counts = Counter()
    return list(open_split(config(folder), split).read(counts)), counts


def write_array(folder, images, labels=LABELS, split="train"):
    folder.mkdir(exist_ok=True)
    np.save(folder / f"{split}.npy", images)
    (folder / f"{split}.labels.txt").write_text("".join(f"{label}\n" for label in labels))


def write_folder(folder, images, split="train"):
    for number, (label, image) in enumerate(zip(LABELS, images, strict=True)):
        (folder / split / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / split / label / f"{number}.png")


def learn_from(*places):
    return learn("image", places, 0, "identity", False)


@pytest.mark.parametrize("images", [GRAY, COLOUR, np.asfortranarray(COLOUR)])
def test_an_array_and_its_labels_are_pairs(tmp_path, images):
    write_array(tmp_path, images)
    pairs, counts = read(tmp_path)
    path = tmp_path / "train.npy"
    assert pairs == [Pair(f"{path}#{i}", label) for i, label in enumerate(LABELS)]
    assert not counts
    tokenizer = learn_from(*(pair.source for pair in pairs))
    assert tokenizer.shape == (4, 3, 3 if images.ndim == 4 else 1)
    for values, image in zip(tokenizer.encode([pair.source for pair in pairs]), images, strict=True):
        assert values.dtype == np.uint8
        assert values.shape == (image.size,)
        np.testing.assert_array_equal(values.reshape(image.shape), image)


@pytest.mark.parametrize("images", [GRAY, COLOUR])
def test_png_files_give_the_pixels_of_the_array_in_the_order_of_label_and_name(tmp_path, images):
    write_folder(tmp_path, images)
    pairs, counts = read(tmp_path)
    expected = sorted(zip(LABELS, range(5), strict=True))
    assert pairs == [Pair(str(tmp_path / "train" / label / f"{i}.png"), label) for label, i in expected]
    assert not counts
    values = learn_from(pairs[0].source).encode([pair.source for pair in pairs])
    np.testing.assert_array_equal(values, images[[i for _, i in expected]].reshape(5, -1))


def test_integer_labels_are_written_in_decimals(tmp_path):
    np.save(tmp_path / "train.npy", GRAY)
    np.save(tmp_path / "train.labels.npy", np.array([3, 0, 10, 3, 1], np.uint16))
    assert [pair.target for pair in read(tmp_path)[0]] == ["3", "0", "10", "3", "1"]


def test_what_was_altered_or_left_out_is_counted_at_each_reading(tmp_path):
    write_array(tmp_path, GRAY, [f"{label}\r" for label in LABELS])
    write_folder(tmp_path, GRAY, "valid")
    for name in ("cat/notes.txt", "cat/5.gif", "cat/.hidden", ".hidden"):
        (tmp_path / "valid" / name).write_text("")
    for _ in range(2):
        assert read(tmp_path)[1] == {text.CARRIAGE_RETURNS_REMOVED: 5}
        pairs, counts = read(tmp_path, "valid")
        assert len(pairs) == 5
        assert counts == {"files that are not .png, .jpg, .jpeg, left out": 2}


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    other = GRAY.copy()
    other[4, 3, 2] ^= 1
    for name, images, labels in [("a", GRAY, LABELS), ("b", GRAY, LABELS), ("c", other, LABELS), ("d", GRAY, "xyxyx")]:
        write_array(tmp_path / name, images, labels)
        write_folder(tmp_path / name, images, "folder")
    a, b, c, d = (open_split(config(tmp_path / name), "train").fingerprint for name in "abcd")
    assert a == b
    assert len({a, c, d}) == 3
    a, b, c = (open_split(config(tmp_path / name), "folder").fingerprint for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (GRAY.astype(np.float32), LABELS, r"train.npy holds float32 \[5, 4, 3\], not images; save them as uint8"),
        (GRAY[0], LABELS, r"train.npy holds uint8 \[4, 3\], not images"),
        (GRAY[:0], [], r"train.npy holds uint8 \[0, 4, 3\], not images; .* at least one"),
        (GRAY, LABELS[:4], r"train.npy has 5 images but .*train.labels.txt has 4 labels"),
        (GRAY, [*LABELS[:4], " "], r"train.labels.txt:5: the label is empty"),
        (np.array([None, "x"]), LABELS, r"train.npy: not a readable array of images"),
    ],
)
def test_arrays_that_are_no_labelled_images_are_refused(tmp_path, images, labels, message):
    write_array(tmp_path, images, labels)
    with pytest.raises(UserError, match=message) as caught:
        open_split(config(tmp_path), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", [np.zeros(5), np.zeros((5, 1), np.int32), np.array(LABELS)])
def test_labels_that_are_no_integers_are_refused(tmp_path, labels):
    np.save(tmp_path / "train.npy", GRAY)
    np.save(tmp_path / "train.labels.npy", labels)
    with pytest.raises(UserError, match=r"train.labels.npy holds .*; save the labels as integers"):
        open_split(config(tmp_path), "train")


def test_missing_or_several_forms_are_named(tmp_path):
    with pytest.raises(UserError, match=r"no split 'train': looked for train.npy and the folder train/$"):
        open_split(config(tmp_path), "train")
    with pytest.raises(UserError, match=r"data\.dir='': name the folder"):
        open_split(config(""), "train")
    np.save(tmp_path / "train.npy", GRAY)
    with pytest.raises(UserError, match=r"no split 'train': looked for train.labels.txt, train.labels.npy"):
        open_split(config(tmp_path), "train")
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=r"more than once: train.npy, train/; keep one"):
        open_split(config(tmp_path), "train")
    (tmp_path / "train.npy").unlink()
    with pytest.raises(UserError, match="train holds no folders; put the images of each label into one"):
        open_split(config(tmp_path), "train")
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(UserError, match=r"cat holds no \.png, \.jpg, \.jpeg; convert its images"):
        open_split(config(tmp_path), "train")


def test_images_of_another_shape_are_refused_by_name(tmp_path):
    np.save(tmp_path / "a.npy", GRAY)
    Image.fromarray(GRAY[0].T).save(tmp_path / "b.png")
    Image.fromarray(COLOUR[0]).save(tmp_path / "c.png")
    tokenizer = learn_from(f"{tmp_path}/a.npy#0")
    for name, shape in (("b.png", "3 by 4 by 1"), ("c.png", "4 by 3 by 3")):
        with pytest.raises(UserError, match=rf"{name} is {shape}, not 4 by 3 by 1 like the first training image"):
            tokenizer.encode([f"{tmp_path}/a.npy#1", f"{tmp_path}/{name}"])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("a.npy#5", r"a.npy#5: the array has 5 images, numbered from 0"),
        ("a.npy", r"a.npy: name one image of the array by its number, as in .*a.npy#0"),
        ("b.npy#0", r"b.npy: not a readable array of images .*No such file"),
        ("b.png", r"b.png: not a readable PNG or JPEG .*No such file"),
        ("broken.png", r"broken.png: not a readable PNG or JPEG"),
        ("cut.png", r"cut.png: not a readable PNG or JPEG"),
        ("clear.png", r"clear.png: an image of mode RGBA; save it as 8-bit grayscale or RGB"),
        ("hole.png", r"hole.png: an image of mode L; save it as 8-bit grayscale or RGB, all opaque"),
        ("deep.png", r"deep.png: an image of mode I;16; save it as 8-bit grayscale or RGB"),
    ],
)
def test_places_without_an_image_are_named(tmp_path, place, message):
    np.save(tmp_path / "a.npy", GRAY)
    Image.fromarray(np.zeros((4, 3, 4), np.uint8)).save(tmp_path / "clear.png")
    Image.fromarray(np.zeros((4, 3), np.uint8)).save(tmp_path / "hole.png", transparency=0)
    Image.fromarray(np.zeros((4, 3), np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:999])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    with pytest.raises(UserError, match=message):
        list(read_images([f"{tmp_path}/{place}"]))


def test_palettes_are_colours_and_bits_are_grays(tmp_path):
    Image.fromarray(COLOUR[0]).quantize(12).save(tmp_path / "palette.png")
    Image.fromarray(GRAY[0] > 127).save(tmp_path / "bits.png")
    palette, bits = read_images([f"{tmp_path}/palette.png", f"{tmp_path}/bits.png"])
    assert palette.shape == (4, 3, 3)
    np.testing.assert_array_equal(bits[..., 0], 255 * (GRAY[0] > 127))


def test_png_without_pillow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        UserError, match=r'x.png: reading PNG and JPEG files needs Pillow; pip install -e "\.\[vision\]"'
    ):
        list(read_images([f"{tmp_path}/x.png"]))


def test_an_array_is_opened_once_for_all_its_images(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", GRAY)
    opened = []
    real = np.load
    monkeypatch.setattr(np, "load", lambda path, **options: opened.append(path) or real(path, **options))
    places = [f"{tmp_path}/a.npy#{i}" for i in range(5)]
    assert len(learn_from(places[0]).encode(places * 9)) == 45
    assert len(opened) == 2
    assert isinstance(open_array(tmp_path / "a.npy"), np.memmap)


def test_saved_and_loaded_is_the_same(tmp_path):
    np.save(tmp_path / "a.npy", GRAY)
    tokenizer = learn_from(f"{tmp_path}/a.npy#0")
    tokenizer.save(tmp_path, "source")
    loaded = load(tmp_path, "source")
    assert (
        (loaded.shape, loaded.fingerprint)
        == (tokenizer.shape, tokenizer.fingerprint)
        == ((4, 3, 1), loaded.fingerprint)
    )
    assert loaded.vocab_size == len(loaded.tokens) == 256
    assert loaded.tokens[255] == "255"
    (tmp_path / "source.json").write_text('{"kind": "image", "shape": [4, 3]}')
    with pytest.raises(UserError, match="is not a jformer tokenizer"):
        load(tmp_path, "source")


def test_pixels_are_not_decoded(tmp_path):
    np.save(tmp_path / "a.npy", GRAY)
    with pytest.raises(NotImplementedError, match="no text"):
        learn_from(f"{tmp_path}/a.npy#0").decode([1, 2])


def test_the_digits_are_split_by_label_and_read_as_images(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    command = [sys.executable, "-m", "experiments.papers.export_digits", f"--output={tmp_path}"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    splits = {split: read(tmp_path, split)[0] for split in ("train", "valid", "test")}
    assert [len(pairs) for pairs in splits.values()] == [1257, 180, 360]
    for pairs in splits.values():
        shares = np.array(list(Counter(pair.target for pair in pairs).values())) / len(pairs)
        assert len(shares) == 10
        assert shares.min() > 0.09
        assert shares.max() < 0.11
    values = np.stack(learn_from(splits["train"][0].source).encode([pair.source for pair in splits["test"]]))
    assert values.shape == (360, 64)
    assert values.max() == 240
    assert not (values % 15).any()


def test_an_image_may_have_no_label_only_where_several_are_possible(tmp_path):
    write_array(tmp_path, GRAY, ["a,b", "", "a", "b", ""])
    several = dataclasses.replace(config(tmp_path), labels="several")
    assert [pair.target for pair in open_split(several, "train").read(Counter())] == ["a,b", "", "a", "b", ""]
    with pytest.raises(UserError, match=r"labels\.txt:2: the label is empty"):
        read(tmp_path)


def test_labels_that_are_not_utf8_are_refused_or_replaced(tmp_path):
    write_array(tmp_path, GRAY[:2], ["", ""])
    (tmp_path / "train.labels.txt").write_bytes(b"caf\xe9\ntea\n")
    with pytest.raises(UserError, match=r"train.labels.txt:1: invalid UTF-8"):
        read(tmp_path)
    counts = Counter()
    split = open_split(dataclasses.replace(config(tmp_path), invalid="replace"), "train")
    assert [pair.target for pair in split.read(counts)] == ["caf\ufffd", "tea"]
