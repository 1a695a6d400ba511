"""What programs are compiled for decides the compiler's options."""

import pytest

from jformer.parallel.backend import Target, compiling_for, xla_options


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--xla_dump_to=somewhere", {"xla_one": False, "xla_one_more": True}),
        ("--xla_dump_to=somewhere --xla_one=true", {"xla_one_more": True}),
        ("--xla_one_more --xla_one", {}),
    ],
)
def test_what_xla_flags_say_is_left_to_them(monkeypatch, flags, options):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with compiling_for(Target("gpu")):
        assert xla_options({"gpu": {"xla_one": False, "xla_one_more": True}, "cpu": {"xla_two": 2}}) == options


def test_other_platforms_have_options_of_their_own():
    with compiling_for(Target("tpu")):
        assert xla_options({"gpu": {"xla_one": False}}) == {}
