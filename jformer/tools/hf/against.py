"""Compare a run with a model that transformers reads from a directory, such as the run's origin; needs torch.

Letters in shapes: b inputs, t positions, n positions of all inputs, v entries of the vocabulary or classes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils.epath import Path as AnyPath
from jaxtyping import Float

from jformer.errors import UserError
from jformer.inference.verify import Check, Subject
from jformer.models import ModelConfig
from jformer.tools.hf.convert import FAMILIES, ORIGIN, PIXELS, find_family
from jformer.tools.hf.families import architecture
from jformer.tools.hf.vit import pixel_scale
from jformer.tools.hf.vocabulary import read_json

SIDES = {"encoder": ("source",), "decoder": ("target",), "encdec": ("source", "target"), "vit": ()}  # read by a family


def check_against(directory: Path, workdir: AnyPath) -> Check:
    """Return a check that the logits of a run are those of a directory's model in transformers, both in float32.

    Raises UserError if transformers or torch is missing, and for a directory without a model that can be imported.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(f"--against needs the package {error.name}: pip install 'jformer[parity]'") from error
    if not (directory / "config.json").exists():
        raise UserError(f"--against={directory}: has no config.json; name the directory of a model of transformers")

    def run(subject: Subject) -> float:
        ours, theirs = both_logits(directory, workdir, subject)
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

    name = f"ours = transformers {transformers.__version__} with torch {torch.__version__}"
    return Check(name, "the largest logit", run)


def both_logits(
    directory: Path, workdir: AnyPath, subject: Subject
) -> tuple[Float[np.ndarray, "n v"], Float[np.ndarray, "n v"]]:
    """Return the logits of a run, and those of a directory's model in transformers, at all positions of its inputs."""
    import torch
    import transformers

    fields = read_json(directory / "config.json")
    origin = read_json(workdir / ORIGIN, {}).get("model_type", "")  # config.json may lack it
    model_type = fields.get("model_type")
    family = find_family(model_type, fields.get("architectures") or [], "" if model_type in FAMILIES else origin)
    config, (batch, _) = subject.model.config, subject.batch()
    ours, real = subject.logits(batch), subject.predicted(batch)
    task = "mlm" if config.head.vectors else subject.config.task  # of the class that has no head
    name = architecture(family, task, config)
    model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = their_logits(model, config, batch, read_json(directory / PIXELS, {})).numpy()
    shared = min(ours.shape[-1], theirs.shape[-1])  # further rows are noise symbols, or pad a table
    return ours[real][:, :shared], theirs[real[:, : theirs.shape[1]]][
        :, :shared
    ]  # a row of ours has room for more vectors


def their_logits(model: Any, config: ModelConfig, batch: Mapping[str, np.ndarray], pixels: Mapping[str, Any]) -> Any:
    """Return the logits that a model of transformers computes for one of our batches, a tensor [b t v].

    The config of our model decides what is read; `pixels`, a preprocessor_config.json, how channels are normalized.
    """
    import torch

    inputs = {}
    for side in SIDES[config.family]:
        ids = batch["source" if side == "source" else "target_in"]
        prefix = "decoder_" if (config.family, side) == ("encdec", "target") else ""
        inputs[f"{prefix}input_ids"] = torch.tensor(np.asarray(ids)).long()
        inputs[f"{prefix}attention_mask"] = torch.tensor(np.asarray(batch[f"{side}_segments"])).long()
    if config.head.num_segments and "source_types" in batch:
        types = np.minimum(batch["source_types"], config.head.num_segments - 1)
        inputs["token_type_ids"] = torch.tensor(types).long()
    if config.reads_images:
        mean, deviation = (np.array(each, np.float32) for each in pixel_scale(pixels))
        values = (np.asarray(batch["image"], np.float32) / 255 - mean) / deviation
        inputs["pixel_values"] = torch.tensor(values).permute(0, 3, 1, 2)
    found = model(**inputs)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)
    if config.head.vectors:
        real = inputs["attention_mask"][..., None].float()
        last = real.sum(1).long() - 1
        pools = {"mean": lambda x: (x * real).sum(1) / real.sum(1), "first": lambda x: x[:, 0],
                 "last": lambda x: x[torch.arange(len(x)), last[:, 0]]}  # fmt: skip
        return pools[config.head.pooling](found.last_hidden_state)[:, None]
    if "logits" not in found:  # of a model without a head
        return found.last_hidden_state @ model.get_input_embeddings().weight.T
    return found.logits[:, None] if found.logits.ndim == 2 else found.logits
