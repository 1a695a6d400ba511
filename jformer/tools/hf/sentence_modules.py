"""The files of sentence-transformers beside a model: how to pool states to a vector, and whether to normalize it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jformer.config.options import Config
from jformer.errors import UserError
from jformer.integrity import parse_json
from jformer.tools.hf.vocabulary import CONFIG, read_json

MODULES, POOLING, LENGTH = "modules.json", "1_Pooling/config.json", "sentence_bert_config.json"
PROMPTS = "config_sentence_transformers.json"
MODES = {  # the flag of a pooling in files up to version 5, and its name since then → ours
    ("pooling_mode_mean_tokens", "mean"): "mean",
    ("pooling_mode_cls_token", "cls"): "first",
    ("pooling_mode_lasttoken", "lasttoken"): "last",
}


class SentenceModules(NamedTuple):
    """How texts become vectors, as a model's directory specifies it."""

    pooling: str  # as in model.head.pooling
    normalize: bool
    max_length: int  # tokens of a text; 0 = as many as the model allows
    notes: list[str]


def read_modules(directory: Path) -> SentenceModules | None:
    """Return what modules.json asks for, or None if there is none; raise UserError for what we do not compute."""
    path = directory / MODULES
    if not path.is_file():
        return None
    modules = parse_json(path.read_bytes())
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{path}: its modules are {', '.join(kinds)}; only Transformer, Pooling and Normalize in this order are "
            "implemented; remove the file to import the encoder alone"
        )
    settings = read_json(directory / str(modules[1]["path"]) / "config.json")
    named = settings.get("pooling_mode") or []
    asked = [flag for flag, value in settings.items() if flag.startswith("pooling_mode_") and value]
    asked += named if isinstance(named, list) else [str(named)]
    poolings = {ours for theirs, ours in MODES.items() if {*theirs} & {*asked}}
    if len(asked) != 1 or not poolings:
        known = ", ".join(flag for flag, _ in MODES)
        raise UserError(f"{directory / POOLING}: pools by {', '.join(map(str, asked))}; one of {known} is implemented")
    older = sorted(directory.glob("sentence_*_config.json"))  # named by the architecture, such as sentence_roberta_…
    texts = read_json(older[0]) if older else {}
    length = texts.get("max_seq_length")
    length = read_json(directory / CONFIG, {}).get("model_max_length") if length is None else length
    prompts = read_json(directory / PROMPTS, {}).get("prompts") or {}
    apart = settings.get("include_prompt") is False and poolings == {"mean"}
    how = "include_prompt=False leaves it out of the mean, --prefix does not" if apart else "give it as --prefix"
    notes = [f"the prompt {text!r} ({how})" for text in prompts.values() if text]
    notes += [f"{older[0].name}: do_lower_case (lowercase texts)"] if texts.get("do_lower_case") else []
    return SentenceModules(poolings.pop(), len(kinds) > 2, length if type(length) is int else 0, notes)


def pooling_of(config: Config) -> str:
    """Return the pooling of a run of task embed; raise UserError for that of a pooler, which has no name there."""
    pooling = config.decode.pooling or config.model.head.pooling
    if pooling == "pooler":
        raise UserError("decode.pooling='pooler': sentence-transformers has no such pooling; use 'first' or 'mean'")
    return pooling


def write_modules(directory: Path, config: Config) -> None:
    """Write the files for a run of task embed, in a form that all versions of sentence-transformers read."""
    model, kinds = config.model, ["Transformer", "Pooling", *["Normalize"] * config.decode.normalize]
    pooling = pooling_of(config)
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    flags = {flag: ours == pooling for (flag, _), ours in MODES.items()}
    content: dict[str, Any] = {
        MODULES: [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
        POOLING: {"word_embedding_dimension": model.d_model, **flags},
        LENGTH: {"max_seq_length": config.data.max_source_length, "do_lower_case": False},
    }
    for path in paths[1:]:
        (directory / path).mkdir()
    for name, values in content.items():
        (directory / name).write_text(json.dumps(values, indent=2) + "\n")
