"""Deterministic operations are asked of XLA once, and not against what the user's own flags say."""

import os

import pytest

from jformer.errors import UserError
from jformer.parallel.deterministic import asks_deterministic, choose_deterministic, deterministic_line

WANTED = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("given", "found"),
    [("", WANTED), ("--xla_a=1", f"--xla_a=1 {WANTED}"), (WANTED, WANTED), ("--xla_gpu_deterministic_ops", None)],
)
def test_the_flag_is_set_once_beside_the_others(monkeypatch, given, found):
    monkeypatch.setenv("XLA_FLAGS", given)
    choose_deterministic()
    assert os.environ["XLA_FLAGS"] == (found or given)


def test_a_flag_that_says_the_contrary_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(UserError, match="XLA_FLAGS has --xla_gpu_deterministic_ops=false: leave out"):
        choose_deterministic()


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        ("", False),
        (WANTED, True),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
        (f"{WANTED} --xla_gpu_deterministic_ops=false", False),
    ],
)
def test_flags_of_the_user_count_too(monkeypatch, given, asks):
    monkeypatch.setenv("XLA_FLAGS", given)
    assert asks_deterministic() is asks


@pytest.mark.parametrize(("platform", "said"), [("gpu", "only deterministic operations"), ("tpu", "nothing on tpu")])
def test_a_line_says_what_it_means_here(monkeypatch, platform, said):
    monkeypatch.setattr("jax.default_backend", lambda: platform)
    assert said in deterministic_line()
