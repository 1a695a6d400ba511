"""The worked examples in the docstrings of jformer/decoding hold."""

import doctest
import importlib
import pkgutil

import pytest

import jformer.decoding

MODULES = [
    importlib.import_module(f"jformer.decoding.{m.name}") for m in pkgutil.iter_modules(jformer.decoding.__path__)
]


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_of_a_module_hold(module):
    assert doctest.testmod(module).failed == 0
