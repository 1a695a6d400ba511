"""What holds for every task."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.data.data_config import SourceConfig
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.vision_config import VisionConfig
from jformer.tasks.build import TASKS
from jformer.tasks.task import sized
from tests.tasks.conftest import TEXTS, make_task

WAYS = [
    (name, batching)
    for name in TASKS
    for batching in ("buckets", "packed")
    if (name, batching) not in [(name, "packed") for name in ("classify", "caption", "qa", "embed")]
]


@pytest.mark.parametrize(("name", "batching"), WAYS)
def test_a_batch_is_a_function_of_seed_and_step(make, name, batching):
    made = make(name, batching=batching)
    again = make.__wrapped__(name, batching=batching)
    assert len(made.batches) > 1
    for step in reversed(range(2 * len(made.batches))):
        batch, other = made.batches[step], again.batches[step]
        assert batch.keys() == other.keys()
        for key, array in batch.items():
            np.testing.assert_array_equal(array, other[key])


@pytest.mark.parametrize(
    ("name", "batching"), [way for way in WAYS if way[0] not in ("qa", "embed")]
)  # see test_qa: two softmaxes; test_embed
def test_loss_counts_what_the_weights_count_and_knows_a_uniform_guess(make, name, batching):
    made = make(name, batching=batching)
    batch = {key: jnp.asarray(array) for key, array in made.batches[0].items()}
    hidden = jnp.zeros((*batch["target_out"].shape, 8))
    sums = jax.jit(lambda hidden, batch: made.task.loss(hidden, lambda h: h @ jnp.zeros((8, 40)), batch))(hidden, batch)
    assert sums["nll"].count == batch["weights"].sum() > 0
    np.testing.assert_allclose(sums["nll"].total, batch["weights"].sum() * math.log(40), rtol=1e-5)
    assert sums["correct"].total == (batch["weights"] * (batch["target_out"] == 0)).sum() < sums["correct"].count


@pytest.mark.parametrize("name", TASKS)
def test_the_one_row_that_holds_no_example_weighs_nothing(make, name):
    made = make(name)
    batches = [made.batches[step] for step in range(len(made.batches))]
    rows = np.concatenate([batch["weights"].any(axis=1) for batch in batches])
    assert len(rows) > rows.sum() == len(TEXTS)
    assert all(batch["row"].tolist() == list(range(len(batch["row"]))) for batch in batches)


@pytest.mark.parametrize(("name", "source", "target", "classes"), [
    ("translate", 10, 20, 0), ("lm", 10, 10, 0), ("mlm", 11, 11, 0), ("denoise", 23, 23, 0), ("classify", 10, 10, 16),
    ("tag", 10, 10, 16),
    ("caption", 20, 20, 0),
])  # fmt: skip
def test_models_get_the_rows_and_classes_that_the_task_needs(name, source, target, classes):
    task, _ = make_task(name)
    both = (10, 20) if name in ("translate", "classify", "tag", "caption") else (10, 10)
    fields = {"vision": VisionConfig(source=True)} if name == "caption" else {"shared_embedding": False}
    model = sized(ModelConfig(**fields), task, *both)
    assert (model.vocab_size, model.target_vocab_size, model.head.num_classes) == (source, target, classes)


@pytest.mark.parametrize(("name", "options"), [
    ("translate", {"overlong": "split"}),
    ("prefix_lm", {"overlong": "split"}),
    ("mlm", {"overlong": "split"}),
    ("classify", {"overlong": "split"}),
    *((name, {"batching": "packed"}) for name in ("classify", "caption", "qa", "embed")),
    ("caption", {"overlong": "split"}),
    *((name, {"source": "captions"}) for name in TASKS if name != "caption"),
    *((name, {"tokenizer": "image"}) for name in TASKS),
    *((name, {"source": "images"}) for name in TASKS),
    *((name, {"source": source}) for name in ("lm", "mlm", "denoise") for source in ("labelled", "conll", "squad")),
])  # fmt: skip
def test_options_that_a_task_cannot_work_with_are_refused_by_their_key(name, options):
    make_task(name)
    ((key, value),) = options.items()
    with pytest.raises(UserError, match=rf"^data\..*{key}='{value}'"):
        make_task(name, **options)


@pytest.mark.parametrize("name", ["translate", "lm", "mlm", "denoise", "classify", "tag", "qa"])
def test_a_source_that_a_task_refuses_is_refused_in_a_mixture_too(name):
    with pytest.raises(UserError, match=rf"^data\.source='captions' is not for task='{name}'"):
        make_task(name, mixture=(SourceConfig(source="captions"),))
