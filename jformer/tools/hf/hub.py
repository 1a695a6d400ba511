"""A model named as on the hub of Hugging Face, brought here by their own package. No conversion."""

import importlib
import re
from pathlib import Path

from jformer.errors import UserError

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name
# What an import reads; never pickle, nor the weights of other libraries.
WANTED = ("*.json", "*.safetensors", "*.spm", "*.model")


def find_model(given: str) -> Path:
    """Return the directory that is given, or that of a model whose owner/name is.

    Raises UserError where the package is missing that fetches models, and for what it cannot fetch.
    """
    if Path(given).exists() or not NAME.fullmatch(given):
        return Path(given)
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UserError(
            f"{given}: is no directory; to fetch the model of that name: pip install huggingface_hub"
        ) from error
    try:
        return Path(hub.snapshot_download(given, allow_patterns=list(WANTED)))
    except Exception as error:  # each of the package, of the network under it, and of the disk is one line here
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{given}: is no directory, and could not be fetched ({reason}); look at its name") from error
