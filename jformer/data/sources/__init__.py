"""Where examples come from, whatever they are: pairs of texts as they stand, no tokens, nothing dropped.

A source opens a split of a corpus by its config. Opening finds and checks the files and fingerprints all that the pairs
depend on; reading streams the pairs in order, empty ones too, and counts what had to be altered.
"""

from collections.abc import Callable

from jformer.data.data_config import SourceConfig
from jformer.data.sources.split import Split
from jformer.data.sources.text_files import open_files, open_labelled
from jformer.errors import check_choice


def open_split(config: SourceConfig, split: str) -> Split:
    """Find a split and check that it is whole. Raise UserError for what is missing, doubtful or misaligned."""
    check_choice("data.source", config.source, SOURCES)
    return SOURCES[config.source](config, split)


def _open_text(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import documents

    return documents.open_split(config, split)


def _open_images(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import images

    return images.open_split(config, split)


def _open_captions(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import captions

    return captions.open_split(config, split)


def _open_tfds(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import tfds

    return tfds.open_split(config, split)


def _open_generated(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import generated

    return generated.open_split(config, split)


def _open_conll(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import conll

    return conll.open_split(config, split)


def _open_squad(config: SourceConfig, split: str) -> Split:
    from jformer.data.sources import squad

    return squad.open_split(config, split)


SOURCES: dict[str, Callable[[SourceConfig, str], Split]] = {
    "files": open_files,
    "labelled": open_labelled,
    "text": _open_text,
    "images": _open_images,
    "captions": _open_captions,
    "tfds": _open_tfds,
    "generated": _open_generated,
    "conll": _open_conll,
    "squad": _open_squad,
}
