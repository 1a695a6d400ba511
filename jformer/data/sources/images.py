"""Labelled images as a source: arrays with labels, or files in folders; `image_files` reads them."""

from collections import Counter
from pathlib import Path

from jformer.data.data_config import SourceConfig
from jformer.data.file_digests import digest
from jformer.data.image_files import SUFFIXES, load_array, open_array
from jformer.data.sources.split import Pair, Split, find, find_folder, fingerprint, listed
from jformer.data.text import read_lines
from jformer.errors import UserError


def open_split(config: SourceConfig, split: str) -> Split:
    """Open SPLIT.npy with SPLIT.labels.txt (a label a line) or SPLIT.labels.npy, or SPLIT/LABEL/*.png (or .jpg).

    The source of a pair is the place of an image (see `image_files`), its target the label. The fingerprint covers the
    content of the files and the labels, not their paths. Raises UserError for missing, misaligned or invalid files.
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
        digests, pairs = [digest(array)[0]], _array_pairs(array, config, split, met)
    else:
        pairs = _folder_pairs(folder, met)
        digests = [digest(Path(pair.source))[0] for pair in pairs]
    return listed(split, fingerprint("images 1", digests, [pair.target for pair in pairs]), pairs, met)


def _array_pairs(array: Path, config: SourceConfig, split: str, counts: Counter[str]) -> list[Pair]:
    (path,) = find(config.dir, split, [[f"{split}.labels.txt"], [f"{split}.labels.npy"]])
    labels = _integer_labels(path) if path.suffix == ".npy" else list(read_lines(path, counts, invalid=config.invalid))
    images = len(open_array(array))
    if images != len(labels):
        raise UserError(
            f"{array} has {images} images but {path} has {len(labels)} labels: label n must be that of image n"
        )
    for number, label in enumerate(labels, start=1):
        if not label.strip() and config.labels != "several":
            raise UserError(f"{path}:{number}: the label is empty; every image needs one")
    return [Pair(f"{array}#{number}", label) for number, label in enumerate(labels)]


def _integer_labels(path: Path) -> list[str]:
    labels = load_array(path, "labels", mmap=False)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UserError(f"{path} holds {labels.dtype} {list(labels.shape)}; save the labels as integers, one an image")
    return [str(label) for label in labels]


def _folder_pairs(folder: Path, counts: Counter[str]) -> list[Pair]:
    pairs = []
    for label in filter(Path.is_dir, _visible(folder)):
        files = _visible(label)
        images = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not images:
            raise UserError(f"{label} holds no {', '.join(SUFFIXES)}; convert its images, or remove the folder")
        if len(images) < len(files):
            counts[f"files that are not {', '.join(SUFFIXES)}, left out"] += len(files) - len(images)
        pairs += [Pair(str(image), label.name) for image in images]
    if not pairs:
        raise UserError(
            f"{folder} holds no folders; put the images of each label into one, as in {folder.name}/cat/1.png"
        )
    return pairs


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
