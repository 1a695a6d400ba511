"""The loss of a model on a split. Letters in shapes: a microbatches, b rows of each."""

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jformer.data.corpus import Corpus, open_corpus
from jformer.data.data_config import DataConfig
from jformer.data.pipeline import Batches, make_batches
from jformer.data.sources.split import Split
from jformer.data.tokenizers import Tokenizer
from jformer.models import ModelConfig
from jformer.models.batch import Batch
from jformer.parallel import processes
from jformer.parallel.backend import Target, target
from jformer.parallel.sharding import sum_over_parts
from jformer.plugins import cached
from jformer.tasks.batch_arrays import place_batch
from jformer.tasks.sums import LossFn, Sums, add_up, sum_over_microbatches
from jformer.tasks.task import Task

KEPT = 8  # compiled steps
BATCHES_AHEAD = 3  # being computed or queued, so that the devices never wait for the host

EvalStep = Callable[[PyTree, Batch], Sums]
"""(parameters, batch [a b …]) → sums over all rows, without dropout."""


def evaluation_batches(
    data: DataConfig, task: Task, tokenizers: tuple[Tokenizer, Tokenizer], split: Split, divisor: int = 1
) -> tuple[Batches, Corpus]:
    """Return batches that hold every usable example of a split once, and its tokens.

    Unlike in training, they have just two shapes, with room for any example within the limits, and no augmentation.

    Args:
        data: limits, and tokens of a batch.
        task: encodes the examples and makes the arrays of a batch.
        tokenizers: of source and target.
        split: the opened split.
        divisor: the rows of a batch are a multiple of it: shards of the mesh times microbatches.
    """
    corpus = open_corpus(split, task.encoder(*tokenizers, evaluating=True), data.cache_dir)
    features = task.features(*tokenizers)
    longest = max(int(sizes.max()) for sizes in features.lengths(corpus.source.lengths, corpus.target.lengths))
    rows = math.lcm(data.rows_divide_by(), divisor)
    tokens = max(data.tokens_per_update, rows * (longest + data.lengths_divide_by() - 1))
    data = dataclasses.replace(data, batching="buckets", num_buckets=2, augment=())
    data = dataclasses.replace(data, tokens_per_update=tokens, row_multiple=rows)
    return make_batches([corpus], [1.0], data, 0, features), corpus


def split_sums(
    eval_step: EvalStep, params: PyTree, batches: Batches, mesh: Mesh, model: ModelConfig, accumulation: int
) -> Sums:
    """Return the sums of the loss, nll and correct predictions over one pass of the batches, as floats.

    At most BATCHES_AHEAD batches are on the devices at a time.

    Args:
        eval_step: from `make_eval_step` for this mesh.
        params: placed on the mesh.
        batches: from `evaluation_batches`.
        mesh: the mesh that splits rows.
        model: determines the valid ids.
        accumulation: microbatches of a batch; with those of training, a batch takes as much memory as an update.

    Raises:
        UserError: for ids outside the model's vocabulary.
    """

    found: list[Sums] = []
    compiled = set()
    for number in range(len(batches)):
        name = f"batch {number + 1} of what is scored"
        batch, *_ = place_batch(batches, number, model, mesh, accumulation, name)
        shape = batches.plan.batch(number).shape
        if shape not in compiled:
            processes.compile_together(eval_step, params, batch)
            compiled.add(shape)
        found.append(eval_step(params, batch))
        jax.block_until_ready(found[-BATCHES_AHEAD:][:1])
    return add_up(jax.device_get(found))


def make_eval_step(loss: LossFn, mesh: Mesh) -> EvalStep:
    """Return the compiled step that evaluates a batch, cached by loss and mesh."""
    return _make_eval_step(loss, mesh, target())


@cached(KEPT)
def _make_eval_step(loss: LossFn, mesh: Mesh, traced_for: Target) -> EvalStep:
    def local(params: PyTree, batch: Batch) -> Sums:
        return sum_over_microbatches(lambda rows: loss(params, rows, None), batch)

    return jax.jit(sum_over_parts(local, mesh))
