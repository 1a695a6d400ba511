"""What a run will hold is said with what there is; what can never be had is refused, what is not free is warned of."""

from types import SimpleNamespace

import pytest

from jformer.config import resolve
from jformer.errors import UserError
from jformer.models import ExecutionConfig, ModelConfig
from jformer.training.forecast import COMPILING, MIB, Forecast, check, compiled_layers, forecast, memory_lines
from jformer.training.machine import Available
from jformer.training.memory import UpdateMemory

UPDATE = UpdateMemory(
    parameters=700 * MIB, optimizer=1_400 * MIB, average=0, gradients=700 * MIB, activations=1_000 * MIB, batch=MIB
)


def mesh(platform, count=1):
    return SimpleNamespace(local_devices=[SimpleNamespace(platform=platform)] * count)


def there(total, free=None, held=300):
    return Available(total * MIB, (total if free is None else free) * MIB, held * MIB)


def test_on_a_cpu_the_whole_process_counts():
    found = forecast(UPDATE, 10 * MIB, there(9_000), mesh("cpu"), 12)
    assert found[:3] == (300 * MIB, 1_701 * MIB, 2_100 * MIB)  # a copy of the state is the largest of the rest
    assert found.unforeseen == 4_101 * MIB // 4
    assert str(found) == "up to 5,126 MiB (300 held, 1,701 updating, 2,100 beside, 1,025 unforeseen)"
    assert forecast(UPDATE, 10 * MIB, there(9_000), mesh("cpu", 4), 12)[1:3] == tuple(4 * size for size in found[1:3])
    small = UPDATE._replace(parameters=MIB, optimizer=2 * MIB)
    assert forecast(small, 0, there(9_000), mesh("cpu"), 12).beside == 1_000 * MIB  # the temporaries once more
    assert forecast(small._replace(activations=MIB), 0, there(9_000), mesh("cpu"), 12).beside == 12 * COMPILING
    assert forecast(UPDATE, 5_000 * MIB, there(9_000), mesh("cpu"), 12)[1:3] == (5_000 * MIB, 5_000 * MIB)  # validation


def test_on_an_accelerator_programs_and_copies_lie_elsewhere():
    assert forecast(UPDATE, 0, there(9_000), mesh("gpu", 4), 12) == Forecast(300 * MIB, 1_701 * MIB, 0)


@pytest.mark.parametrize(("unroll", "layers"), [(0, 5), (1, 2), (2, 4)])
def test_layers_of_a_loop_are_compiled_once(unroll, layers):
    execution = ExecutionConfig(unroll=unroll)
    assert compiled_layers(ModelConfig(num_layers=3, num_decoder_layers=2, execution=execution)) == layers


def test_vectors_of_an_encoder_decoder_take_no_decoder():
    assert compiled_layers(ModelConfig(num_layers=3, num_decoder_layers=2).with_vectors()) == 3


FOUND = Forecast(1_000 * MIB, 1_500 * MIB, 1_000 * MIB)


def test_what_can_never_be_had_is_refused_with_a_key():
    remedy = (
        r"up to 3,500 MiB .*, more than the 2,050 MiB of memory: raise train\.accumulation=1, lower data\.tokens_per"
    )
    with pytest.raises(UserError, match=remedy):
        check(FOUND, there(2_050), resolve({}), True)
    with pytest.raises(UserError, match=r"the 1,400 MiB of memory: use a smaller model, or shard it over devices \(m"):
        check(FOUND, there(1_400), resolve({}), True)
    assert check(FOUND, there(2_100), resolve({}), True)  # the forecast may be too high by as much


def test_on_an_accelerator_only_the_compiler_knows_what_does_not_fit(monkeypatch):
    monkeypatch.setattr("jformer.training.forecast.available", lambda device: there(1_400))
    given = resolve({}), ModelConfig()
    *_, warning = memory_lines(*given, mesh("gpu"), UPDATE, 0)
    assert warning.startswith("warning: that may exceed the free memory: raise train.accumulation=1")
    with pytest.raises(UserError, match=r"more than the 1,400 MiB of memory"):
        [*memory_lines(*given, mesh("cpu"), UPDATE, 0)]


@pytest.mark.parametrize("model", [{"execution": {"remat": "full"}}, {"recurrent": {"cell": "lstm"}}])
def test_a_remedy_that_is_taken_or_that_the_model_lacks_is_not_named(model):
    warning = check(FOUND, there(9_000, free=2_499), resolve({"model": model}), True)
    assert warning.endswith("raise train.accumulation=1 or lower data.tokens_per_update=8192")


def test_what_is_not_free_is_a_warning():
    assert check(FOUND, there(9_000, free=2_500), resolve({}), True) == ""
    warning = check(FOUND, there(9_000, free=2_499), resolve({}), True)
    assert warning.startswith("that may exceed the free memory: raise train.accumulation=1, lower data.tokens_per_up")
