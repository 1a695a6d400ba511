import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jformer.checkpoints.digests import _digest, _digest_on_host, digests
from jformer.parallel.mesh import make_mesh

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def digest(array):
    (found,) = digests({"x": jnp.asarray(array)}).values()
    return found


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
def test_a_digest_is_the_same_on_every_mesh_and_gathers_nothing(sizes):
    mesh = make_mesh(*sizes)
    for spec in (P(), P(None, "fsdp", "tensor"), P("data")):
        if all(X.shape[i] % mesh.shape[axis] == 0 for i, axis in enumerate(spec) if axis):
            placed = jax.device_put(X, NamedSharding(mesh, spec))
            assert digest(placed) == digest(X) == f"{int(_digest(placed)):08x}"
            assert "all-gather" not in _digest.lower(placed).compile().as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, bool, "key"])
def test_a_small_array_has_the_digest_that_devices_compute(dtype):
    small = jax.random.split(jax.random.key(3), 4) if dtype == "key" else jnp.arange(-3, 9).reshape(3, 4).astype(dtype)
    assert digests({"x": small}) == {"x": f"{int(_digest(small)):08x}"}


@pytest.mark.parametrize("shape", [(3, 4), (2**18 + 15,)])
def test_an_array_of_numpy_has_the_digest_that_it_has_on_a_device(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert digests({"x": array}) == digests({"x": jnp.asarray(array)}) == {"x": f"{_digest_on_host(array):08x}"}


def test_an_array_of_the_host_is_not_copied_to_a_gpu(monkeypatch):
    array = np.random.default_rng(0).standard_normal(2**18 + 15).astype(np.float32)
    wanted = digests({"x": array})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jformer.checkpoints.digests._digest", None)  # the program that would run there
    assert digests({"x": array}) == wanted


def test_one_flipped_bit_changes_it():
    seen = {digest(X)}
    for at in np.random.default_rng(1).integers(0, X.nbytes * 8, 20):
        changed = bytearray(X.tobytes())
        changed[at // 8] ^= 1 << (at % 8)
        seen.add(digest(np.frombuffer(changed, np.float32).reshape(X.shape)))
    assert len(seen) == 21


def test_the_place_of_an_element_counts():
    swapped = X.copy()
    swapped[1, 2, 3], swapped[3, 2, 1] = X[3, 2, 1], X[1, 2, 3]
    assert len({digest(X), digest(swapped), digest(X[::-1]), digest(np.zeros_like(X)), digest(-np.zeros_like(X))}) == 5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, bool])
def test_arrays_of_every_width_have_one(dtype):
    zeros = jnp.zeros((3, 5), dtype)
    assert digest(zeros) != digest(zeros.at[2, 4].set(jnp.ones((), dtype)))


def test_names_are_paths_and_keys_of_random_numbers_are_arrays_too():
    tree = {"rest": {"step": jnp.int32(3), "key": jax.random.key(1)}}
    assert digests(tree).keys() == {"rest/step", "rest/key"}
    assert digests(tree) != digests({"rest": {"step": jnp.int32(3), "key": jax.random.key(2)}})
