"""What a directory that somebody else wrote is not trusted with: values of the wrong kind, and more than it holds."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jformer.checkpoints.reading import first_line
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.tools.hf.tensors import Tensors


@contextlib.contextmanager
def explained(directory: Path) -> Iterator[None]:
    """Turn what a value of the wrong kind makes of our code into one line: the files are others', their fields many."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{directory}: a JSON file of it holds a value of a kind that it cannot have "
            f"({type(error).__name__}: {first_line(error)}); fetch it again"
        ) from error


def refuse_missing_layers(model: ModelConfig, source: Tensors) -> None:
    """Raise UserError for a config.json with more layers than there are tensors, before any of them is made."""
    layers = max(model.num_layers, model.num_decoder_layers)
    found = len(source.found)
    if layers > found:
        raise UserError(f"config.json asks for {layers:,} layers, and there are {found:,} tensors: fetch both again")
