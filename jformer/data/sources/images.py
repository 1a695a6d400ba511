"""Images as a source and as tokens: arrays or PNG files, read as u8 [h w c]. No resizing, no scaling, no augmentation.

An image is written by its place: "PATH.png", or "PATH.npy#17" for item 17 of an array u8 [n h w] or [n h w c].
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from jformer.data.config import SourceConfig
from jformer.data.sources.split import Pair, Split, find, find_folder, fingerprint
from jformer.data.text import digest, read_lines
from jformer.errors import UserError


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.npy with SPLIT.labels.txt (a label a line) or SPLIT.labels.npy, or the PNG files SPLIT/LABEL/*.png.

    The source of a pair is the written form of an image, its target the label. The fingerprint covers the content of
    the files and the labels, not their place. Raises UserError for what is missing, misaligned or no such array.
    """
    root = find_folder(config.dir).resolve()
    array, folder = root / f"{split}.npy", root / split
    if array.is_file() and folder.is_dir():
        raise UserError(
            f"data.dir={config.dir!r} holds split {split!r} more than once: {array.name}, {split}/; keep one"
        )
    if not array.is_file() and not folder.is_dir():
        raise UserError(
            f"data.dir={config.dir!r} has no split {split!r}: looked for {array.name} and the folder {split}/"
        )
    met: Counter[str] = Counter()
    if array.is_file():
        digests, pairs = [digest(array)[0]], _array_pairs(array, config.dir, split, met)
    else:
        pairs = _folder_pairs(folder, met)
        digests = [digest(Path(pair.source))[0] for pair in pairs]

    def read(counts: Counter[str]) -> Iterator[Pair]:
        counts.update(met)
        return iter(pairs)

    return Split(split, fingerprint("images 1", digests, [pair.target for pair in pairs]), read)


def _array_pairs(array: Path, folder: str, split: str, counts: Counter[str]) -> list[Pair]:
    (path,) = find(folder, split, [[f"{split}.labels.txt"], [f"{split}.labels.npy"]])
    labels = _integer_labels(path) if path.suffix == ".npy" else list(read_lines(path, counts))
    images = len(open_array(array))
    if images != len(labels):
        raise UserError(
            f"{array} has {images} images but {path} has {len(labels)} labels: label n must be that of image n"
        )
    for number, label in enumerate(labels, start=1):
        if not label.strip():
            raise UserError(f"{path}:{number}: the label is empty; every image needs one")
    return [Pair(f"{array}#{number}", label) for number, label in enumerate(labels)]


def _integer_labels(path: Path) -> list[str]:
    labels = _load(path, "labels", mmap=False)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path} holds {labels.dtype} {list(labels.shape)}; save the labels as integers, one an image")
    return [str(label) for label in labels]


def _folder_pairs(folder: Path, counts: Counter[str]) -> list[Pair]:
    pairs = []
    for label in filter(Path.is_dir, _visible(folder)):
        files = _visible(label)
        images = [path for path in files if path.suffix.lower() == ".png"]
        if not images:
            raise UserError(f"{label} holds no .png; convert its images, or remove the folder")
        if len(images) < len(files):
            counts["files that are no .png, left out"] += len(files) - len(images)
        pairs += [Pair(str(image), label.name) for image in images]
    if not pairs:
        raise UserError(
            f"{folder} holds no folders; put the images of each label into one, as in {folder.name}/cat/1.png"
        )
    return pairs


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def open_array(path: Path) -> np.ndarray:
    """Map an array of images into memory as u8 [n h w c]. Raise UserError if it is none."""
    images = _load(path, "images", mmap=True)
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.size:
        found = f"{images.dtype} {list(images.shape)}"
        raise UserError(f"{path} holds {found}, not images; save them as uint8 [n h w] or [n h w c], at least one")
    return images if images.ndim == 4 else images[..., None]


def _load(path: Path, what: str, mmap: bool) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r" if mmap else None)
    except Exception as error:  # NumPy reads the header as Python literals, and raises whatever that raises
        why = " ".join(str(error).split())
        raise UserError(f"{path}: no array of {what} that can be read ({why}); write it with numpy.save") from error


def read_images(places: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the images u8 [h w c] that stand at some places. Raise UserError for a place that holds none."""
    open_once = functools.cache(open_array)
    for place in places:
        path, _, number = place.rpartition("#")
        if path.endswith(".npy") and number.isdecimal():
            images = open_once(Path(path))
            if int(number) >= len(images):
                raise UserError(f"{place}: the array has {len(images)} images, numbered from 0")
            yield images[int(number)]
        elif place.endswith(".npy"):
            raise UserError(f"{place}: name one image of the array by its number, as in {place}#0")
        else:
            yield _read_png(Path(place))


def _read_png(path: Path) -> np.ndarray:
    """Read 8-bit grayscale, or colours as RGB."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f'{path}: reading PNG files needs Pillow; pip install -e ".[vision]"') from error
    try:
        with Image.open(path, formats=["PNG"]) as image:
            if image.mode not in ("1", "L", "P", "RGB") or image.has_transparency_data:
                raise UserError(f"{path}: an image of mode {image.mode}; save it as 8-bit grayscale or RGB, all opaque")
            pixels = np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    except UserError:
        raise
    except (OSError, SyntaxError, ValueError) as error:  # Pillow calls a broken PNG a syntax error, or a value error
        raise UserError(f"{path}: not a PNG that can be read ({error})") from error
    return pixels if pixels.ndim == 3 else pixels[..., None]
