"""Every product of a model has the precision of its config, also in gradients that are traced outside of it."""

import re

import jax
import pytest

from jformer.models import ExecutionConfig
from jformer.models.recurrent_config import RecurrentConfig
from jformer.tasks.losses import chunked_cross_entropy
from tests.conftest import make_batch
from tests.slow import slow_but

MODELS = {
    "chunks": {"positions": "transformer_xl", "execution": ExecutionConfig(unroll=1, remat="full", attention_chunk=2)},
    "gru": {
        "recurrent": RecurrentConfig(cell="gru", attention="concat", bridge="dense"),
        "d_ff": 2048,  # these are not read
        "num_heads": 8,
    },
}


@pytest.mark.parametrize("precision", slow_but(["default", "highest"], "highest"))
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_every_product_of_an_update_has_the_precision_of_the_config(tiny, fields, precision):
    model, params = tiny(**fields, precision=precision)
    batch = jax.tree.map(jax.numpy.asarray, make_batch([5, 6], [6, 7]))

    def loss(params):
        hidden = model.apply({"params": params}, batch, method="hidden")

        def project(some):
            return model.apply({"params": params}, some, method="logits")

        return chunked_cross_entropy(hidden, project, batch["target_out"], batch["weights"])["loss"].total

    with jax.default_matmul_precision(None):  # JAX's own, also where a session of tests sets another
        text = jax.jit(jax.grad(jax.jit(loss))).lower(params).as_text()
    found = re.findall(r"precision = \[(\w+), (\w+)\]", text)
    assert len(found) > 20
    assert set(found) == {(precision.upper(),) * 2}
