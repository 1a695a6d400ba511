"""jformer: encoder-decoder Transformers and their family in JAX and Flax Linen.

`__all__` lists the public API; docs/library.md shows it in use. JAX is imported on first use.
"""

import contextlib
import importlib
import threading
from collections.abc import Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack

from jformer.errors import UserError
from jformer.inference.answers import (
    Activations,
    Alignment,
    Attended,
    AttentionWeights,
    Choice,
    Output,
    Part,
    Request,
    Scored,
    SearchTree,
)
from jformer.parallel.libtpu import silence_libtpu

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from jformer.config.options import Config
    from jformer.decoding.decode_config import DecodeOptions
    from jformer.inference.generation import search_ids as search
    from jformer.inference.predict import Predictor
    from jformer.inference.restore import restore, save_run
    from jformer.models import ModelConfig, build_model, init_params
    from jformer.models.interventions import activations, at_layer, intervene
    from jformer.models.layers.matmul import jax_gradients
    from jformer.parallel.mesh import make_mesh
    from jformer.tasks.batch_arrays import make_batch
    from jformer.tasks.task import adapted_loss, adapted_params, make_loss, token_loss
    from jformer.training.optim import per_layer
    from jformer.training.state import create_state
    from jformer.training.step import make_train_step

PARTS = {  # building block of a custom training loop → where it is; imported on first use
    "ModelConfig": "jformer.models:ModelConfig",
    "activations": "jformer.models.interventions:activations",
    "adapted_loss": "jformer.tasks.task:adapted_loss",
    "adapted_params": "jformer.tasks.task:adapted_params",
    "at_layer": "jformer.models.interventions:at_layer",
    "build_model": "jformer.models:build_model",
    "create_state": "jformer.training.state:create_state",
    "init_params": "jformer.models:init_params",
    "intervene": "jformer.models.interventions:intervene",
    "jax_gradients": "jformer.models.layers.matmul:jax_gradients",
    "make_batch": "jformer.tasks.batch_arrays:make_batch",
    "make_loss": "jformer.tasks.task:make_loss",
    "make_mesh": "jformer.parallel.mesh:make_mesh",
    "make_train_step": "jformer.training.step:make_train_step",
    "per_layer": "jformer.training.optim:per_layer",
    "restore": "jformer.inference.restore:restore",
    "save_run": "jformer.inference.restore:save_run",
    "search": "jformer.inference.generation:search_ids",
    "token_loss": "jformer.tasks.task:token_loss",
}
__version__ = "0.1.0"
__all__ = [
    "Activations",
    "Alignment",
    "Attended",
    "AttentionWeights",
    "Choice",
    "ModelConfig",
    "Output",
    "Part",
    "Request",
    "Scored",
    "SearchTree",
    "UserError",
    "__version__",
    "activations",
    "adapted_loss",
    "adapted_params",
    "at_layer",
    "build_model",
    "create_state",
    "evaluate",
    "init_params",
    "intervene",
    "jax_gradients",
    "load",
    "make_batch",
    "make_loss",
    "make_mesh",
    "make_train_step",
    "per_layer",
    "restore",
    "save_run",
    "search",
    "token_loss",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in PARTS:
        raise AttributeError(f"module 'jformer' has no attribute {name!r}")
    module, _, part = PARTS[name].partition(":")
    silence_libtpu()
    return getattr(importlib.import_module(module), part)


def load(
    workdir: str | PathLike[str], options: Mapping[str, object] | None = None, **decode: "Unpack[DecodeOptions]"
) -> "Predictor":
    """Return the Predictor of a trained run: `jformer.load(DIR, beam_size=1).predict(texts)`.

    Keyword arguments replace the run's own options of `jformer.decoding.decode_config.DecodeConfig`; `options` replaces
    any others, by key: `{"evaluate.weights": "ema"}`. All devices share the work; if `options` sets a key of `mesh`,
    they are laid out like the run's mesh with that change. Raises UserError if there is no run, and for an option that
    does not exist, cannot work, or cannot change after training.
    """
    silence_libtpu()
    from jformer.inference.predict import load
    from jformer.inference.restore import saved_config
    from jformer.parallel.mesh import make_mesh

    laid_out = any(key.startswith("mesh.") for key in options or ())  # else all devices, whatever the run trained on
    return load(workdir, saved_config(workdir, options, **decode), None if laid_out else make_mesh())


def train(config: "ConfigDict | Config | Mapping[str, Any]", workdir: str | PathLike[str]) -> bool:
    """Train a run in a directory, or resume the one there; return False if a signal stopped it before its end.

    If this is called from the main thread, SIGTERM, SIGINT and SIGHUP stop it as they stop the command: it finishes the
    current update and saves it. A second SIGINT ends the process at once.

    The config is one from `jformer.config.default_config`, modified as in a config file, or a resolved one.

    Raises UserError for a config that cannot work or belongs to another run, for data that cannot be read, and for a
    directory that cannot be written.
    """
    silence_libtpu()
    from jformer.config import resolve
    from jformer.parallel import processes
    from jformer.storage import check_writable, os_errors_as_user_errors, run_path
    from jformer.trainer import train

    if not fspath(workdir):
        raise UserError("workdir='' names no directory")
    check_writable("workdir", run_path(workdir))
    with contextlib.ExitStack() as heeding, os_errors_as_user_errors():
        if threading.current_thread() is threading.main_thread():  # only it can set signal handlers
            heeding.enter_context(processes.heed_signals("stopped"))
            processes.defer_stop()
        return train(resolve(config), run_path(workdir))


def evaluate(
    workdir: str | PathLike[str],
    output: str | PathLike[str] | None = None,
    options: Mapping[str, object] | None = None,
    **decode: "Unpack[DecodeOptions]",
) -> dict[str, Any]:
    """Score a trained run on its test sets, add the scores to its results.json and return them.

    The result has a key for each test set, and "schema" and "run". With `output`, results.json and the answers are
    written to that folder instead. `options` and keyword arguments are as in `load`. Raises UserError as `load` does,
    and for a folder that cannot be written, before anything is answered.
    """
    silence_libtpu()
    from jformer.evaluation.evaluate import evaluate
    from jformer.inference.restore import saved_config
    from jformer.storage import check_writable, os_errors_as_user_errors, run_path

    config, folder = saved_config(workdir, options, **decode), run_path(output or workdir)
    check_writable("output" if output else "workdir", folder)
    with os_errors_as_user_errors():
        return evaluate(config, run_path(workdir), folder if output else None)
