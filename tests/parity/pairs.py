"""A model of transformers and ours, which was read from the files that theirs wrote, on the same ragged batch."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jformer.models import build_model
from jformer.parallel.mesh import make_mesh
from jformer.tools.hf import convert, tensors
from jformer.tools.hf.against import their_logits
from jformer.tools.hf.families import LOGITS_BIAS

WANTED = "comparing with the published models needs: pip install torch transformers"
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

V = 40  # ids of the batch are below
LENGTHS = {"source": (14, 9, 5), "target": (11, 12, 3)}


class Pair:
    """One model on both sides, with random weights of a deviation; with a bias for its logits if there may be one."""

    def __init__(self, name, fields, directory, seed=0, deviation=0.2, bias=False):
        cls, rng = getattr(transformers, name), np.random.default_rng(seed)
        model = cls(cls.config_class(**fields))
        if "T5" in name and not fields.get("tie_word_embeddings", True):
            # Their T5 ties whatever its config says, unless the files hold two tables that differ, as those of 1.1 do.
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if weight.requires_grad:
                    centre = weight.ndim == 1 and path.endswith("weight")
                    weight.copy_(torch.tensor(centre + deviation * rng.standard_normal(weight.shape, np.float32)))
            if bias and hasattr(model, convert.BIAS):
                model.final_logits_bias.copy_(torch.tensor(rng.standard_normal(model.final_logits_bias.shape)))
        model.save_pretrained(directory)
        self.theirs = cls.from_pretrained(directory).eval()
        self.fields = json.loads((directory / "config.json").read_text())
        self.family = convert.find_family(self.fields["model_type"])
        self.task = convert.find_task(self.family, self.fields["architectures"])
        source = tensors.Tensors(directory, functools.partial(convert.renamed, self.family))
        if convert.BIAS in source.found:
            self.fields[LOGITS_BIAS] = bool(source.read(convert.BIAS).any())
        self.found = convert.read_model(self.family, self.fields, self.task, source)
        self.model, self.params = self.found.model, convert.read_params(self.found, make_mesh(1))
        self.batch = self.draw(rng)

    def draw(self, rng):
        batch, model = {}, self.model
        for side, tokens in (("source", "source"), ("target", "target_in")):
            lengths = np.array(LENGTHS[side])
            shape = (len(lengths), lengths.max())
            real = np.arange(shape[1]) < lengths[:, None]
            pad = self.fields.get("pad_token_id") or 0
            batch[tokens] = np.where(real, rng.integers(3, V - 1, shape), pad).astype(np.int32)
            batch[f"{side}_segments"] = real.astype(np.int32)
            batch[f"{side}_positions"] = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        batch["source_types"] = (batch["source_positions"] > 4).astype(np.int32) * (model.head.num_segments > 1)
        vision = model.vision
        image = rng.integers(0, 256, (3, vision.image_size, vision.image_size, vision.channels))
        return jax.tree.map(jnp.asarray, batch | {"image": image.astype(np.uint8)})

    def real(self):
        """Return where the model predicts."""
        if self.model.pooled:
            return np.ones((3, 1), np.float32)
        side = "source" if self.model.family == "encoder" else "target"
        return np.asarray(self.batch[f"{side}_segments"], np.float32)

    def labels(self):
        """Return what is to be predicted."""
        most = self.model.head.num_classes or V
        return np.random.default_rng(7).integers(0, most, self.real().shape)

    def run_theirs(self):
        return their_logits(self.theirs, self.model, self.batch, {})

    def loss(self, params):
        logits = build_model(self.model).apply({"params": params}, self.batch)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), self.labels()[..., None], axis=-1)[..., 0]
        return -(log_probs * self.real()).sum() / self.real().sum(), logits


def apart(ours, theirs):
    """Return the largest difference, relative to the largest number."""
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
