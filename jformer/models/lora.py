"""Low-rank adapters (LoRA: Hu et al. 2022) of the kernels of any model of this room.

A kernel [d f] that is adapted has two factors beside it, a [d r] and b [r f]: its module adds alpha/r · b(a(x)).
Models and layers need no code for them.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from jformer.errors import UserError
from jformer.models.layers.dropout import Site, dropout, make_dropout_key
from jformer.models.layers.matmul import matmul
from jformer.models.lora_config import FACTORS, LoraConfig
from jformer.models.model import Wrapped
from jformer.models.parts import STACKED

PROJECTION = re.compile(r"(?<!/distance)/kernel$")  # kernels that multiply an input; Transformer-XL's has distances


@dataclasses.dataclass(frozen=True)
class Adapted(Wrapped):
    """A model with the factors of `model.lora` among its parameters."""

    def init(self, rngs: Array, *args: PyTree) -> PyTree:
        """Return the base's parameters, with factors whose products are zero."""
        flat = flatten_dict(self.base.init(rngs, *args)["params"], sep="/")
        lora, key = self.config.lora, jax.random.fold_in(rngs, zlib.crc32(b"lora"))
        kernels = sorted(name for name in flat if PROJECTION.search(name) and not lora.trains(name))
        adapted = [name for name in kernels if re.search(lora.kernels, name)]
        if not adapted:
            names = ", ".join(kernels[:3])
            raise UserError(f"model.lora.kernels={lora.kernels!r} matches no kernel; their names are like {names}")
        for name in adapted:
            *layers, inputs, outputs = flat[name].shape
            drawn = jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), (*layers, inputs, lora.rank))
            flat |= _factors(name, drawn / inputs**0.5, jnp.zeros((*layers, lora.rank, outputs)))
        return {"params": rounded(lora, unflatten_dict(flat, sep="/"))}

    def apply(
        self, variables: PyTree, *args: PyTree, rngs: Mapping[str, Array] | None = None, **options: object
    ) -> PyTree:
        """Apply a method of the base, with the products of the factors added to its adapted projections."""
        lora, key = self.config.lora, None
        if rngs and lora.dropout:
            key = make_dropout_key(jax.random.fold_in(rngs["dropout"], 1), args[0]["row"])
        layer: Array | int = 0  # of the block that is being computed

        def add(call: Callable[..., Any], given: Any, named: Any, context: nn.module.InterceptorContext) -> Any:
            nonlocal layer
            module, outer = cast(Any, context.module), layer
            if context.method_name != "__call__":
                return call(*given, **named)
            layer = given[1] if module.name == STACKED else layer
            y, layer = call(*given, **named), outer
            if module.has_variable("params", "embedding"):
                return y.astype(jnp.float32)  # rows of a rounded table are scaled in float32, like others
            if not module.has_variable("params", FACTORS[0]):
                return y
            a, b = (module.get_variable("params", factor)["kernel"] for factor in FACTORS)
            own = key and key._replace(seed=key.seed + jnp.uint32(zlib.crc32("/".join(module.path).encode())))
            x = dropout(given[0], lora.dropout, own and own.at_layer(jnp.asarray(layer)), Site.INPUT)
            return y + lora.scale * matmul(matmul(x, a), b).astype(y.dtype)

        variables = {**variables, "params": rounded(lora, variables["params"])}
        with nn.intercept_methods(add):
            return self.base.apply(variables, *args, rngs=rngs, **options)


def rounded(lora: LoraConfig, params: PyTree) -> PyTree:
    """Return the parameters with those of the base in `model.lora.base_dtype`."""
    if lora.base_dtype == "float32":
        return params
    flat = flatten_dict(params, sep="/")
    flat |= {name: leaf.astype(lora.base_dtype) for name, leaf in flat.items() if lora.rounds(name)}
    return unflatten_dict(flat, sep="/")


def merged(lora: LoraConfig, params: PyTree) -> PyTree:
    """Return the parameters of the base, rounded as in training, with the products of the factors added to kernels."""
    flat = {name: leaf.astype(jnp.float32) for name, leaf in flatten_dict(rounded(lora, params), sep="/").items()}
    for name in [name for name in flat if name.endswith(f"/{FACTORS[0]}/kernel")]:
        kernel = name.replace(f"/{FACTORS[0]}/", "/")
        a, b = (flat.pop(factor) for factor in _factors(kernel, None, None))
        flat[kernel] = flat[kernel] + lora.scale * jnp.matmul(a, b, precision="highest")
    return unflatten_dict(flat, sep="/")


def _factors(kernel: str, a: Any, b: Any) -> dict[str, Any]:
    module = kernel.removesuffix("kernel")
    return {f"{module}{factor}/kernel": value for factor, value in zip(FACTORS, (a, b), strict=True)}
