"""Read activations of any model by name, or replace them by a function of them. Models need no code for it.

A name is the path of the module that computes an activation, as in the names of parameters, and what it is:

    PATH/output   what a module returns: `decoder/block/output` after each layer, `decoder/block/self_attn/output` …
    PATH/heads    [b t h u] of an attention: the output of each head, before the output projection
    PATH/units    [b t f] of a feed-forward: after the nonlinearity, before the last projection
    PATH/weights  [b h t s] of an attention, with PATH/mask: read-only, as some kernels never make them
    logits        [b t v]

Activations inside a stack have a leading layer axis, like its parameters. `*` in a name stands for any part of it.

Letters: b rows, t query positions, s key positions, h heads, u size of a value, f features, d d_model, v vocabulary.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree

from jformer.errors import UserError
from jformer.models.batch import Batch, example_batch
from jformer.models.model import Model, Wrapped
from jformer.models.parts import STACKED
from jformer.plugins import cached

Intervention = Callable[[Array, Array | int], Array]
"""(an activation, the number of its layer from 0) → its replacement. Outside of stacks the layer is 0."""

METHODS = ("__call__", "extend", "attend_cached")  # methods that return an activation, alone or first
CACHED = ("extend", "memory_kv")  # methods in which a stack runs its blocks one by one, each as a model of its own
READ = {"o": "heads", "down": "units"}  # projection → the name of what it reads


@dataclasses.dataclass(frozen=True)
class Intervened(Wrapped):
    """A model with some activations replaced by functions of them, in whole passes and with a cache."""

    interventions: tuple[tuple[str, Intervention], ...]

    def apply(self, variables: PyTree, *args: PyTree, **options: object) -> PyTree:
        """Apply a method of the base, with the interventions."""
        with nn.intercept_methods(_Visitor(self.replace)):
            return self.base.apply(variables, *args, **options)

    def replace(self, name: str, value: Array, layer: Array | int, module: nn.Module) -> Array:
        """Return what the interventions make of an activation, for `_Visitor`."""
        for pattern, intervention in self.interventions:
            if fnmatchcase(name, pattern):
                new = jnp.asarray(intervention(value, layer), value.dtype)
                if new.shape != value.shape:
                    raise UserError(f"intervention in {name!r}: {value.shape} became {new.shape}; keep the shape")
                value = new
        return value


def intervene(model: Model, interventions: Mapping[str, Intervention]) -> Intervened:
    """Return a model with the named activations replaced; it can be jitted, as the original can.

    Interventions that the model already has come before the new ones.

    Raises UserError for a name that matches no activation, and for `at_layer` with a layer that has none of that name.
    """
    if before := interventions_of(model):
        model = cast(Intervened, model).base
    for pattern, intervention in interventions.items():
        _refuse_unknown(pattern, _replaceable(model))
        depth = _depth(model, pattern)
        if not 0 <= (number := getattr(intervention, "layer_number", 0)) < depth:
            raise UserError(f"at_layer({number}) in {pattern!r}: its layers are 0 to {depth - 1}")
    return Intervened(model, (*before, *interventions.items()))


def interventions_of(model: Model) -> tuple[tuple[str, Intervention], ...]:
    """Return the interventions in a model, each with its name, in order; a name may come twice."""
    return getattr(model, "interventions", ())


def intervened_as(other: Model, model: Model) -> Model:
    """Return a model with the interventions of another one, except those in parts that it does not have.

    Raises UserError for one in a pooler, whose activations have other names in a model of vectors.
    """
    found = interventions_of(other)
    for pattern, _ in found:
        if pattern.startswith("pooler/"):
            _refuse_unknown(pattern, _replaceable(model))
    kept = tuple(each for each in found if getattr(each[1], "layer_number", 0) < _depth(model, each[0]))
    return Intervened(model, kept) if kept else model


def at_layer(number: int, intervention: Intervention) -> Intervention:
    """Return an intervention in one layer, numbered from 0."""
    return _AtLayer(number, intervention)


@dataclasses.dataclass(frozen=True)
class _AtLayer:
    layer_number: int
    intervention: Intervention

    def __call__(self, value: Array, layer: Array | int) -> Array:
        return jnp.where(layer == self.layer_number, self.intervention(value, layer), value)


def _depth(model: Model, pattern: str) -> int:
    """Return the number of layers that have an activation of a name; 0 if nothing has it."""

    def layers(name: str) -> int:
        if STACKED not in name.split("/"):
            return 1
        return model.config.decoder_layers if name.startswith("decoder/") else model.config.num_layers

    return max((layers(name) for name in _replaceable(model) if fnmatchcase(name, pattern)), default=0)


def activations(model: Model, params: PyTree, batch: Batch, names: str | Sequence[str] = "*") -> dict[str, Array]:
    """Return name → activation of one forward pass without dropout; jit it with `names`, one or several, closed over.

    Raises UserError for a name that matches no activation.
    """
    seen: dict[str, Array] = {}
    names = [names] if isinstance(names, str) else [*names]
    replaced = cast(Intervened, model) if interventions_of(model) else Intervened(model, ())

    def visit(name: str, value: Array, layer: Array | int, module: nn.Module) -> Array:
        # One visitor for both: with two, the outer one would see a projection's input before the inner one.
        return _recorded(name, replaced.replace(name, value, layer, module), layer, module)

    with nn.intercept_methods(_Visitor(visit)):
        variables, mutable = {"params": params}, ["intermediates"]
        hidden, of_hidden = replaced.base.apply(variables, batch, method="hidden", mutable=mutable)
        _, of_logits = replaced.base.apply(variables, hidden, method="logits", mutable=mutable)
    for found in (of_hidden, of_logits):
        seen |= {name: value for name, (value,) in flatten_dict(found.get("intermediates", {}), sep="/").items()}
    for pattern in names:
        _refuse_unknown(pattern, seen)
    return {name: value for name, value in seen.items() if any(fnmatchcase(name, pattern) for pattern in names)}


class _Visitor:
    """Intercepts methods of modules, and replaces each activation by `visit(name, value, layer, its module)`."""

    def __init__(self, visit: Callable[[str, Array, Array | int, nn.Module], Array]) -> None:
        self.visit = visit
        self.inside: tuple[str, ...] = ()  # the path of a block that runs as a model of its own
        self.layer: Array | int = 0

    def __call__(self, call: Callable[..., Any], given: Any, named: Any, context: Any) -> Any:
        module, method, outer = context.module, context.method_name, (self.inside, self.layer)
        path: tuple[str, ...] = module.path
        if self.inside and path[: len(self.inside) - 1] != self.inside[:-1]:
            path = (*self.inside, *path)
        is_block = path[-1:] == (STACKED,)
        runs_blocks = method in CACHED and bool(path) and not is_block
        if runs_blocks:
            self.inside, self.layer = (*path, STACKED), -1
        elif is_block and method in (*CACHED, "__call__"):
            self.layer = self.layer + 1 if method in CACHED else given[1]
        elif method == "__call__" and STACKED in path[:-2] and path[-1] in READ:
            given = (self._read(path, given[0], module.parent), *given[1:])
        y = call(*given, **named)
        layer = self.layer if STACKED in path else 0
        if runs_blocks or (is_block and method == "__call__"):
            self.inside, self.layer = outer
        if not path:
            return self.visit("logits", y, 0, module) if method == "logits" else y
        if method not in METHODS:
            return y
        value, *others = y if isinstance(y, tuple) else (y,)
        value = self.visit("/".join((*path, "output")), value, layer, module)
        return (value, *others) if isinstance(y, tuple) else value

    def _read(self, path: tuple[str, ...], x: Array, parent: Any) -> Array:
        """Visit the input of a projection; for attention, head by head."""
        name = READ[path[-1]]
        shape = (*x.shape[:-1], parent.config.num_heads, -1) if name == "heads" else x.shape
        return self.visit("/".join((*path[:-1], name)), x.reshape(shape), self.layer, parent).reshape(x.shape)


def _recorded(name: str, value: Array, layer: Array | int, module: Any) -> Array:
    """Sow a value into its module, unless one of its submodules has the name."""
    last = name.rpartition("/")[2]
    if module.has_variable("intermediates", last) or not module.scope.name_reserved(last, "intermediates"):
        module.sow("intermediates", last, value, reduce_fn=lambda old, new: (new,))
    return value


@cached(64)
def _replaceable(model: Model) -> frozenset[str]:
    """Return the names of all activations that can be replaced."""
    names = set[str]()

    def note(name: str, value: Array, layer: Array | int, module: nn.Module) -> Array:
        names.add(name)
        return value

    def trace(key: Array) -> PyTree:
        batch = example_batch(model.config)
        params = model.init(key, batch)["params"]
        with nn.intercept_methods(_Visitor(note)):
            hidden = model.apply({"params": params}, batch, method="hidden")
            return model.apply({"params": params}, hidden, method="logits")

    jax.eval_shape(trace, jax.random.key(0))
    return frozenset(names)


def _refuse_unknown(pattern: str, known: Iterable[str]) -> None:
    if not any(fnmatchcase(name, pattern) for name in known):
        like = ", ".join(sorted(name for name in known if STACKED in name or "/" not in name))
        raise UserError(f"no activation is named {pattern!r} here; there are {like}")
