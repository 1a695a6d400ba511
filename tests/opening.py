"""Open a run up to its loop, without training."""

from types import SimpleNamespace

from etils import epath

from jformer.trainer import train


def opened(config, workdir):
    """Return the arguments that the loop of a run gets; the log and the checkpoints are closed."""
    found = {}
    train(config, epath.Path(workdir), lambda **arguments: found.update(arguments))
    return SimpleNamespace(**found)
