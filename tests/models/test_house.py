"""The models stay small enough to read in an evening, and no family is told apart by its class."""

import ast
import dataclasses
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


def classes(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def attributes(node):
    """Return the fields of a class and what its methods assign to self, in a tuple or by setattr too."""
    fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    targets = [t for n in ast.walk(node) if isinstance(n, ast.Assign) for target in n.targets for t in ast.walk(target)]
    own = {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"}
    return fields | own


@pytest.mark.parametrize("name", MODULES)
def test_the_room_offers_its_modules_by_name(name):
    assert getattr(models, name).__name__ == name


def test_the_room_is_under_3480_lines_and_no_file_over_250():
    sizes = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert sum(sizes.values()) < 3_480, sizes
    assert max(sizes.values()) <= 250, sizes


def test_no_module_class_has_more_than_twelve_attributes():
    found = {node.name: attributes(node) for path in FILES for node in classes(ast.parse(path.read_text()))}
    assert {"EncoderDecoder", "Block", "Stack"} <= set(found)
    assert found["SequenceToSequence"] == {"config", "source_embedding", "target_embedding", "head"}
    modules = {name: names for name, names in found.items() if not name.endswith("Config")}
    assert max(map(len, modules.values())) <= 12, modules
    # Block makes its norms by name: one for each sublayer, and a second one in a sandwich.
    assert len(found["Block"]) + 6 <= 12


def test_options_are_at_most_33_and_nested_ones_at_most_eight():
    fields = dataclasses.fields(ModelConfig)
    nested = [f for f in fields if dataclasses.is_dataclass(f.type)]
    assert len(fields) - len(nested) <= 33
    assert len(nested) == 6
    assert all(len(dataclasses.fields(f.type)) <= 8 for f in nested)


def test_nothing_asks_what_class_a_model_is():
    models = {node.name for path in FILES for node in classes(ast.parse(path.read_text()))}
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
