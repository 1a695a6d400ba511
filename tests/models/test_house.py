"""The room offers its modules by name, and no family is recognised by its class."""

import ast
import functools
from pathlib import Path

import jax
import pytest

from jformer import models
from jformer.models import FAMILIES, MODULES, ModelConfig, build_model, init_params
from jformer.models.head_config import HeadConfig
from jformer.models.model_config import CHOICES
from jformer.models.vision_config import VisionConfig

ROOT = Path(__file__).parents[2] / "jformer"
FILES = sorted((ROOT / "models").rglob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_the_room_offers_its_modules_by_name(name):
    assert getattr(models, name).__name__ == name


def test_nothing_asks_what_class_a_model_is():
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    models = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
                asked = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node.args[1])}
                assert not asked & models, f"{path}:{node.lineno}"


def test_every_family_has_a_class_and_shares_the_stack():
    assert set(FAMILIES) == set(CHOICES["family"])
    for family in FAMILIES:
        head = HeadConfig(num_classes=3) if family == "vit" else HeadConfig()
        config = ModelConfig(family=family, vocab_size=9, target_vocab_size=9, head=head, vision=VisionConfig(8, 4, 1))
        shapes = jax.eval_shape(functools.partial(init_params, build_model(config)), jax.random.key(0))
        stacks = [part["block"] for part in shapes.values() if isinstance(part, dict) and "block" in part]
        assert stacks
        for block in stacks:
            assert set(block) >= {"self_attn", "self_attn_norm", "feed_forward", "feed_forward_norm"}
