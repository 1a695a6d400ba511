"""Where examples come from, whatever they are: pairs of texts as they stand, no tokens, nothing dropped.

A source opens a split of a corpus by its config. Opening finds and checks the files and fingerprints all that the pairs
depend on; reading streams the pairs in order, empty ones too, and counts what had to be altered.
"""

from typing import Protocol

from jformer import plugins
from jformer.data.data_config import SOURCES, SourceConfig
from jformer.data.sources.split import Split


class OpenSplit(Protocol):
    """What a source is: a function that opens a split. `jformer.testing.check_source` checks one."""

    def __call__(self, config: SourceConfig, split: str) -> Split:
        """Return the split; raise UserError for what is missing, doubtful or misaligned."""


def open_split(config: SourceConfig, split: str) -> Split:
    """Find a split and check that it is whole. Raise UserError for what is missing, doubtful or misaligned."""
    open_named: OpenSplit = plugins.find("data.source", config.source, SOURCES)
    return open_named(config, split)
