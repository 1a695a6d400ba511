"""What a model is trained to do: each task is a value."""

from jformer.tasks.task import Task
from jformer.tasks.translate import translate

TASKS = {"translate": translate}

__all__ = ["TASKS", "Task"]
