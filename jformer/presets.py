"""Named models as rows: what a preset sets, over the defaults of ModelConfig."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # Wu et al. 2021, for corpora of some ten thousand pairs.
    "transformer_tiny": {"num_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 4, "dropout": 0.3},
    # Vaswani et al. 2017, Table 3.
    "transformer_base": {},
    "transformer_big": {"d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3},
}
