"""The options of low-rank adapters, and which parameters are trained with them."""

import dataclasses
import re
from typing import Any

from jformer.errors import UserError, check_choice, check_least, check_range, refuse_unknown

FACTORS = ("lora_a", "lora_b")  # beside a kernel [d f]: [d r] and [r f]
LARGE = re.compile(r"/kernel$|embedding/embedding$")  # names of kernels and vocabularies' tables

HEADS = ("head/", "classifier/")  # computed from hidden states, without a dropout key


def is_factor(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter."""
    return any(f"/{factor}/" in name for factor in FACTORS)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters of the kernels of train.init_from, which stay as they are (LoRA: Hu et al. 2022)."""

    rank: int = 0  # r: columns of the first factor and rows of the second (section 4.1); 0 = no adapters
    alpha: float = 16.0  # alpha / rank scales the product of the factors (section 4.1)
    dropout: float = 0.0  # on the input of the first factor; not in heads
    # A regular expression: kernels with adapters, except those of `also`; the default is the paper's best (Table 5)
    kernels: str = "/(q|v)/kernel$"
    # Regular expressions over names of parameters that are trained whole, such as ^classifier/ for a new head
    also: tuple[str, ...] = ()
    # float32 | bfloat16: what the base's kernels and vocabularies' tables are rounded to and kept in (half the memory)
    base_dtype: str = "float32"

    @property
    def scale(self) -> float:
        """The scale of the product of the factors."""
        return self.alpha / self.rank

    def trains(self, name: str) -> bool:
        """Return whether a parameter is trained and saved; without adapters all are."""
        return not self.rank or is_factor(name) or any(re.search(pattern, name) for pattern in self.also)

    def rounds(self, name: str) -> bool:
        """Return whether a parameter of the base is rounded to `base_dtype`."""
        return self.base_dtype != "float32" and not self.trains(name) and bool(LARGE.search(name))

    def check(self, model: Any) -> None:
        """Raise UserError for the first option that cannot work, or that nothing would read."""
        check_least("model.lora", self, ("rank",), 0)
        check_range("model.lora", self, ("dropout",), 0, 1 - 2**-17)  # rounded to 16 bits, it keeps something
        check_choice("model.lora.base_dtype", self.base_dtype, ("float32", "bfloat16"))
        for key, pattern in (("kernels", self.kernels), *(("also", pattern) for pattern in self.also)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise UserError(f"model.lora.{key}={pattern!r} is not a regular expression: {error}") from error
        if not self.rank:
            refuse_unknown("model.lora", self, (), "a model without adapters (model.lora.rank=0)")
        for key, value in (("recurrent.cell", model.recurrent.cell), ("parametrization", model.parametrization)):
            if self.rank and value not in ("", "standard"):
                raise UserError(f"model.lora.rank={self.rank}: adapters do not support model.{key}={value!r}; use 0")
