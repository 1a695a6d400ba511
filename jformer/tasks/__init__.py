"""What a model is trained to do: each task is a value."""

from collections.abc import Callable, Mapping

from jformer.tasks.classify import classify
from jformer.tasks.denoise import denoise
from jformer.tasks.lm import lm
from jformer.tasks.mlm import mlm
from jformer.tasks.task import Task, sized
from jformer.tasks.translate import translate

TASKS: Mapping[str, Callable[..., Task]] = {
    "translate": translate,
    "lm": lm,
    "mlm": mlm,
    "denoise": denoise,
    "classify": classify,
}
"""Name → (data options, *, label_smoothing, scores, tokenize, lowercase) → task."""

__all__ = ["TASKS", "Task", "sized"]
