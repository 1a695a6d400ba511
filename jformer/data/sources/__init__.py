"""Data sources: pairs of texts, untokenized, none dropped.

A source opens a split of a corpus by its config. Opening finds and checks the files and fingerprints everything that
the pairs depend on; reading streams the pairs in order, empty ones included, and counts changes made to them.
"""

from typing import Protocol

from jformer import plugins
from jformer.data.data_config import SOURCES, SourceConfig
from jformer.data.sources.split import Split


class OpenSplit(Protocol):
    """A source: a function that opens a split. `jformer.testing.check_source` checks one."""

    def __call__(self, config: SourceConfig, split: str) -> Split:
        """Return the split. Raise UserError for missing, ambiguous or misaligned data."""


def open_split(config: SourceConfig, split: str) -> Split:
    """Find and check a split. Raise UserError for missing, ambiguous or misaligned data."""
    open_named: OpenSplit = plugins.find("data.source", config.source, SOURCES)
    return open_named(config, split)
