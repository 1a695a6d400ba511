"""Marian's Transformer, the architecture of OPUS-MT (Tiedemann and Thottingal 2020).

It is the model of Vaswani et al. 2017, with all sines of a position before its cosines, where ours alternate. Import
permutes the features of the residual stream in every module that reads or writes it, which is exact and changes no
output. Their config has no field for the epsilon of norms, which is torch's 1e-5.
"""

from typing import Any

import numpy as np

from jformer.models import ModelConfig
from jformer.tools.hf import bart
from jformer.tools.hf.families import Fields, HfFamily
from jformer.tools.hf.name_tables import Entry, Table

READERS = ("q", "k", "v", "up", "output")  # modules that read the residual stream; all others write it


def _table(model: ModelConfig) -> Table:
    table = bart.common(model)
    return {path: entry if path == "head/bias" else _renamed(path, entry, model) for path, entry in table.items()}


def _renamed(path: str, entry: Entry, model: ModelConfig) -> Entry:
    """Permute the features of the residual stream to our order when reading, to theirs when writing."""
    halves = np.arange(model.d_model)
    ours, theirs = halves.reshape(2, -1).T.ravel(), halves.reshape(-1, 2).T.ravel()
    *_, module, leaf = path.split("/")

    def take(array: np.ndarray, order: np.ndarray) -> np.ndarray:
        if module in READERS:
            return array[order] if leaf == "kernel" else array
        # `o` and `down` read heads or hidden units, which keep their order.
        return array[..., order]

    return entry._replace(
        read=lambda array: take(entry.read(array), ours), write=lambda array: entry.write(take(array, theirs))
    )


def _read(fields: Fields) -> dict[str, Any]:
    options = bart.read(fields)
    own = {"shared_embedding": False, "target_vocab_size": fields["decoder_vocab_size"]}
    return options if fields["share_encoder_decoder_embeddings"] else options | own


def _write(model: ModelConfig) -> dict[str, Any]:
    target = model.target_vocab_size or model.vocab_size
    one = model.shared_embedding or (not model.tied_output and target == model.vocab_size)
    own = {"share_encoder_decoder_embeddings": one, "decoder_vocab_size": target}
    return bart.write(model) | own


MARIAN = HfFamily(
    model_type="marian",
    classes={"MarianMTModel": "translate", "MarianModel": "translate"},
    options={**bart.OPTIONS, "vocab_size": ("vocab_size", 58_101)},
    defaults={**bart.DEFAULTS, "share_encoder_decoder_embeddings": True, "decoder_vocab_size": 0},
    ours={"norm": "post", "norm_epsilon": 1e-5, "positions": "sinusoidal"},
    theirs={"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False,
     "static_position_embeddings": True},
    table=_table, read=_read, write=_write,
    copies=bart.COPIES,
    unread=(*bart.BART.unread, r"model\.(encoder|decoder)\.embed_positions\.weight"), prefix="model.",
)  # fmt: skip
