"""Parameters beside those of a model: LoRA (Hu et al. 2021) as a user writes it, trained alone and merged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jformer.parallel.mesh import make_mesh
from jformer.parallel.sharding import replicated
from jformer.tasks.task import adapted_loss, adapted_params, make_loss, token_loss
from jformer.training.state import create_state
from jformer.training.step import make_train_step
from tests.conftest import make_batch


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adds a·b to the query projection of every layer of the encoder."""

    rank: int

    def init(self, base, key):
        layers, inputs, outputs = base["encoder"]["block"]["self_attn"]["q"]["kernel"].shape
        down = jax.random.normal(key, (layers, inputs, self.rank)) / inputs**0.5
        return {"q": {"kernel": down, "up": jnp.zeros((layers, self.rank, outputs))}}

    def apply(self, base, adapter):
        def add(path, leaf):
            names = [step.key for step in path]
            is_query = names[0] == "encoder" and names[-2:] == ["q", "kernel"]
            return leaf + adapter["q"]["kernel"] @ adapter["q"]["up"] if is_query else leaf

        return jax.tree_util.tree_map_with_path(add, base)


@pytest.mark.slow
def test_an_adapter_is_trained_alone_on_a_mesh_and_merged(tiny):
    model, base = tiny()
    lora, mesh = Lora(2), make_mesh(2, 2, 2)
    params = {**base, "adapter": lora.init(base, jax.random.key(1))}
    plain = make_loss(model, token_loss(0.0))
    loss = adapted_loss(plain, lora)
    batch = jax.tree.map(jnp.asarray, make_batch([7, 5, 6, 4], [6, 4, 3, 5]))
    of_base, of_both = (jax.jit(lambda params, of=of: of(params, batch, None)["loss"].total) for of in (plain, loss))
    before = of_base(base)
    assert of_both(params) == before  # its second factor begins with zeros
    frozen = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key != "adapter", params)
    tx = optax.adamw(0.05, weight_decay=0.1)  # decay moves what is frozen, too, unless the update prevents it
    update = make_train_step(loss, tx, mesh, seed=0, frozen=frozen)
    state = jax.device_put(create_state(jax.tree.map(jnp.copy, params), tx, ema=False), replicated(mesh))
    for _ in range(5):
        state, _ = update(state, jax.tree.map(lambda x: x[None], batch))
    trained = jax.device_get(state.params)
    for name in base:
        jax.tree.map(np.testing.assert_array_equal, trained[name], jax.device_get(base[name]))
    merged = adapted_params(lora, trained)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    after = of_base(merged)
    assert after < before
    np.testing.assert_allclose(of_both(trained), after, rtol=1e-6)
