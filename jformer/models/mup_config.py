"""The options of maximal update parametrization, and which models it is for."""

import dataclasses
from typing import Any

from jformer.errors import UserError, check_least, refuse_unknown


@dataclasses.dataclass(frozen=True)
class MupConfig:
    """The base model whose best learning rate a wider one shares (Yang et al. 2022); parametrization='mup' only.

    A model of the base's size is drawn, computed and trained as with the standard parametrization, except that an
    untied projection to logits starts at zero.
    """

    base_width: int = 128  # d_model of the base
    base_heads: int = 0  # num_heads of the base; 0 = as many as this model, whose heads are then wider

    def check(self, model: Any) -> None:
        """Raise UserError for the first option that is not defined here, or that a base model could not have."""
        check_least("model.mup", self, ("base_width",), 1)
        check_least("model.mup", self, ("base_heads",), 0)
        if model.parametrization == "standard":
            refuse_unknown("model.mup", self, (), "a model of model.parametrization='standard'")
            return
        if model.family not in ("encdec", "decoder") or model.vision.source or model.recurrent.cell:
            raise UserError(
                "model.parametrization='mup' is for Transformers from text to text: family encdec or decoder"
            )
        if model.attention_scale != "sqrt":
            raise UserError(f"model.attention_scale={model.attention_scale!r}: with parametrization='mup' use 'sqrt'")
        heads = self.base_heads or model.num_heads
        if not model.d_k and self.base_width % heads:
            raise UserError(f"model.mup.base_width={self.base_width} must be a multiple of the base's {heads} heads")
