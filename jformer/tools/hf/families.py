"""A family of Transformers models: which of our options it has, under which names, and where its tensors are.

A family maps its config.json to our options and back. It can express a model of ours if the fields it writes, read
back, give the same model; no further rules are needed.
"""

import dataclasses
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.head_config import HeadConfig
from jformer.tools.hf.name_tables import Table, linear

Fields = Mapping[str, Any]
"""Their config.json, or another JSON object of theirs."""

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
ACTIVATIONS |= {"silu": "silu", "swish": "silu"}
LOGITS_BIAS = "_logits_bias"  # not a field of theirs: whether the stored bias of the logits is nonzero
PLAIN = ModelConfig()  # the defaults
TRAINING_ONLY = (
    *("init", "dropout", "attention_dropout", "activation_dropout", "embedding_dropout", "output_dropout"),
    *("dtype", "precision", "execution"),
)


@dataclasses.dataclass(frozen=True)
class HfFamily:
    """One architecture of Transformers."""

    model_type: str  # in config.json
    classes: Mapping[str, str]  # architecture → our task; export writes the first of a task
    options: Mapping[str, tuple[str, Any]]  # their field → our option, such as `vision.patch_size`, and their default
    ours: Mapping[str, Any]  # our options that the architecture fixes
    theirs: Fields  # fields for which only this value is implemented
    table: Callable[[ModelConfig], Table]
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: ACTIVATIONS)  # their names → ours
    defaults: Fields = dataclasses.field(default_factory=dict)  # of further fields, which `read` knows
    read: Callable[[Fields], dict[str, Any]] = lambda fields: {}  # noqa: E731, RUF100
    write: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}  # noqa: E731, RUF100
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)  # tensor → the tensor that it repeats
    unread: tuple[str, ...] = ()  # patterns of tensors to ignore
    start: int = -1  # decoder_start_token_id of a config.json without one; -1: that of padding
    prefix: str = ""  # of all tensor names except a head's; files of a model without a head leave it out

    def is_unread(self, name: str) -> bool:
        """Return whether a tensor of theirs can be ignored."""
        return name in self.copies or any(re.fullmatch(pattern, name) for pattern in self.unread) or self.is_head(name)

    def is_head(self, name: str) -> bool:
        """Return whether a tensor belongs to a head: the rest of the model does not depend on it."""
        return bool(self.prefix) and not name.startswith(self.prefix)


def table_of(family: HfFamily, model: ModelConfig, task: str) -> Table:
    """Return the table of a model for a task; `qa` has a tagger's, with another name for the head."""
    table = family.table(model)
    return table | linear("classifier", "qa_outputs") if task == "qa" else table


def _read(family: HfFamily, key: str, ours: str, value: Any) -> Any:
    """Return the value of our option for that of a field. Raise UserError for one that is not implemented."""
    if ours == "activation":
        if value not in (known := family.activations):
            raise UserError(f"config.json: {key}={value!r} is not implemented; known: {', '.join(known)}")
        return known[value]
    wanted = type(operator.attrgetter(ours)(PLAIN))
    numbers = (int, float) if wanted is float else int
    if wanted is not bool and (isinstance(value, bool) or not isinstance(value, numbers)):
        raise UserError(f"config.json: {key}={value!r} must be a number")
    return value


def _written(family: HfFamily, ours: str, model: ModelConfig) -> Any:
    """Return the value of a field for our option. Raise UserError for an activation that the family lacks."""
    value = operator.attrgetter(ours)(model)
    if ours != "activation":
        return value
    theirs = {ours: their for their, ours in reversed([*family.activations.items()])}
    if value not in theirs:
        raise UserError(f"model.activation={value!r}: the architecture has only {', '.join(theirs)}")
    return theirs[value]


def model_config(family: HfFamily, fields: Fields, task: str, num_classes: int = 0) -> ModelConfig:
    """Return our options for a config.json. Raise UserError naming the field that is not implemented."""
    defaults = {key: default for key, (_, default) in family.options.items()}
    fields = {**defaults, **family.defaults, **{key: value for key, value in fields.items() if value is not None}}
    for key, value in family.theirs.items():
        if fields.get(key, value) != value:
            raise UserError(
                f"config.json: {key}={fields[key]!r} is not implemented for {family.model_type}: only {value!r}"
            )
    values = {ours: _read(family, key, ours, fields[key]) for key, (ours, _) in family.options.items()}
    options = dict(family.ours)
    for option, value in (values | family.read(fields)).items():
        name, _, inner = option.partition(".")
        group = options.get(name, getattr(PLAIN, name))
        options[name] = dataclasses.replace(group, **{inner: value}) if inner else value
    head = dataclasses.replace(options.pop("head", HeadConfig()), num_classes=num_classes)
    if task in ("tag", "qa"):  # classes of every position
        head = dataclasses.replace(head, pooling="none", pooler=False)
    options |= {key: float(value) for key, value in options.items() if type(getattr(PLAIN, key)) is float}
    model = ModelConfig(**options, head=head)
    model.check()
    rows = model.target_vocab_size or model.vocab_size
    return dataclasses.replace(model, target_vocab_size=rows if model.family == "encdec" else 0)


def config_fields(family: HfFamily, model: ModelConfig, task: str) -> dict[str, Any]:
    """Return the config.json of a model of ours. Raise UserError for the first option the family cannot express."""
    normal = _normal(model)
    fields = {**family.theirs, **{key: _written(family, ours, normal) for key, (ours, _) in family.options.items()}}
    fields |= {key: value for key, value in family.write(model).items() if value is not None}
    back, wanted = _normal(model_config(family, fields, task, model.head.num_classes)), normal
    if is_bare(model, task):
        back = dataclasses.replace(back, head=dataclasses.replace(back.head, transform=False))
    if model.head.vectors:
        back = back.with_vectors(model.head.pooling)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(wanted, field.name), getattr(back, field.name)
        if ours != theirs and field.name not in TRAINING_ONLY:
            name, ours, theirs = _first_difference(field.name, ours, theirs)
            raise UserError(f"model.{name}={ours!r}: {family.model_type} has only {theirs!r} there")
    return {"model_type": family.model_type, **fields}


def _first_difference(name: str, ours: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Return the first option of a group that differs, and both values; for a single option, the arguments."""
    for field in dataclasses.fields(ours) if dataclasses.is_dataclass(ours) else ():
        pair = getattr(ours, field.name), getattr(theirs, field.name)
        if pair[0] != pair[1]:
            return f"{name}.{field.name}", *pair
    return name, ours, theirs


def is_bare(model: ModelConfig, task: str) -> bool:
    """Return whether an encoder has no head for masked tokens, like their classes whose names end in Model."""
    return task == "mlm" and model.head == dataclasses.replace(model.head, transform=False, bias=False)


def architecture(family: HfFamily, task: str, model: ModelConfig) -> str:
    """Return their class of a model for a task. Raise UserError if there is none."""
    for name, does in family.classes.items():  # the first, or of an encoder without a head the bare one
        if does == task and (name.endswith("Model") or not is_bare(model, task)):
            return name
    raise UserError(f"task={task!r} is not for {family.model_type}, which has {', '.join(family.classes)}")


def _normal(model: ModelConfig) -> ModelConfig:
    """Replace zeros by the values they stand for, and shared layers by separate ones: equal models compare equal."""
    encdec, learned = model.family == "encdec", model.positions == "learned" and model.family != "vit"
    return dataclasses.replace(
        model,
        shared_layers=False,  # `own_layers` gives each its own
        num_decoder_layers=model.decoder_layers if encdec else 0,
        target_vocab_size=(model.target_vocab_size or model.vocab_size) if encdec else 0,
        num_kv_heads=model.kv_heads,
        d_k=model.key_size,
        d_v=model.value_size,
        max_length=model.max_length if learned else ModelConfig.max_length,
        vocab_size=0 if model.family == "vit" else model.vocab_size,
    )
