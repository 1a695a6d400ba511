import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jformer.checkpoints.digests import _digest_in_parts, _digest_on_host, _digests, _is_large_on_one_cpu, digests
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
            (computed,) = _digests([placed])
            assert digest(placed) == digest(X) == f"{int(computed):08x}"
            assert "all-gather" not in _digests.lower([placed]).compile().as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, bool, "key"])
def test_a_small_array_has_the_digest_that_devices_compute(dtype):
    small = jax.random.split(jax.random.key(3), 4) if dtype == "key" else jnp.arange(-3, 9).reshape(3, 4).astype(dtype)
    (computed,) = _digests([small])
    assert digests({"x": small}) == {"x": f"{int(computed):08x}"}


@pytest.mark.parametrize("shape", [(3, 4), (2**18 + 15,)])
def test_an_array_of_numpy_has_the_digest_that_it_has_on_a_device(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert digests({"x": array}) == digests({"x": jnp.asarray(array)}) == {"x": f"{_digest_on_host(array):08x}"}


def test_an_array_of_the_host_is_not_copied_to_a_gpu(monkeypatch):
    array = np.random.default_rng(0).standard_normal(2**18 + 15).astype(np.float32)
    wanted = digests({"x": array})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("jformer.checkpoints.digests._digests", None)  # the program that would run there
    assert digests({"x": array}) == wanted


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of older JAX drops the barriers before it schedules")
def test_many_arrays_take_no_more_memory_than_one():
    arrays = [jax.ShapeDtypeStruct((256, 1024), jnp.float32)] * 8
    assert _digests.lower(arrays).compile().memory_analysis().temp_size_in_bytes < 2 * 256 * 1024 * 4


@pytest.mark.parametrize("shape", [(16, 128, 128), (7, 37_501), (2**18 + 15,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_large_array_has_the_digest_that_a_mesh_computes(shape, dtype):
    large = jax.random.normal(jax.random.key(0), shape, dtype)
    (whole,) = _digests([large])
    assert _is_large_on_one_cpu(large)
    assert int(digest(large), 16) == int(whole)


def test_of_the_hashes_of_a_large_array_a_sixteenth_is_written_down():
    large = jax.ShapeDtypeStruct((16, 128, 256), jnp.float32)
    memory = _digest_in_parts.lower(large).compile().memory_analysis().temp_size_in_bytes
    assert memory < 16 * 128 * 256 * 4 / 8


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
