"""Fetch a model from the Hugging Face hub with huggingface_hub. No conversion here."""

import importlib
import re
from pathlib import Path

from jformer.errors import UserError

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name
# The files that an import reads; never pickle, nor the weights of other libraries.
WANTED = ("*.json", "*.safetensors", "*.spm", "*.model", "vocab.txt", "merges.txt")


def find_model(given: str) -> Path:
    """Return a model's directory: the given one, or the one fetched for owner/name.

    Raises UserError if huggingface_hub is missing, or cannot fetch the model.
    """
    if Path(given).exists() or not NAME.fullmatch(given):
        return Path(given)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UserError(
            f"{given}: is not a directory; to fetch the model of that name: pip install huggingface_hub"
        ) from error
    try:
        return Path(hub.snapshot_download(given, allow_patterns=list(WANTED)))
    except Exception as error:  # of the package, the network or the disk: one line for each
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{given}: is not a directory, and could not be fetched ({reason}); look at its name"
        ) from error
