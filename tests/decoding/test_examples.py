"""The worked examples in the docstrings of jformer/decoding hold, and every public function has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import jformer.decoding

MODULES = [
    importlib.import_module(f"jformer.decoding.{m.name}") for m in pkgutil.iter_modules(jformer.decoding.__path__)
]


def public_functions(module):
    """Return the names of the functions that a module defines for others."""
    return {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_examples_of_a_module_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_public_function_has_an_example(module):
    found = {test.name.rpartition(".")[2] for test in doctest.DocTestFinder().find(module) if test.examples}
    assert public_functions(module) - found <= {"one_by_one"}  # the loop of greedy search and sampling, which have one
