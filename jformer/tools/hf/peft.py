"""LoRA adapters in the files of PEFT: import one as a run whose base is another run, and export a run of adapters.

Their factors are A [r in] and B [out r] of a module, with a scale of its own. Ours are A and B transposed, in the order
of our kernel, those of all layers of a stack in one array and with one scale: ranks are filled up with zeros, which
training leaves as they are, and scales are multiplied into B. Which modules have factors is read from the tensors: no
pattern is interpreted.
"""

import dataclasses
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from numpy.typing import NDArray

from jformer.checkpoints.untie_layers import own_layers
from jformer.checkpoints.weights import abstract_params, load_parent, load_saved, write_run
from jformer.config import resolve
from jformer.config.checks import name_parent
from jformer.config.options import Config
from jformer.data.tokenizers import NumberTokenizer, Tokenizer
from jformer.errors import UserError
from jformer.integrity import parse_object
from jformer.models import ModelConfig, build_model
from jformer.models.lora_config import FACTORS, LoraConfig, is_factor
from jformer.parallel import processes
from jformer.parallel.mesh import make_mesh
from jformer.storage import filling, new_directory, new_disk_directory
from jformer.tools.hf import name_tables as tables
from jformer.tools.hf import tensors, vocabulary
from jformer.tools.hf.convert import FIELDS, LABELLED, explained, make_config, read_answers, read_model, renamed, sized
from jformer.tools.hf.families import Fields, HfFamily, is_bare, table_of
from jformer.tools.hf.name_tables import Entry, Table
from jformer.tools.hf.write_model import StoredRun, express, in_units, read_run, standardized

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of all tensors
WITHOUT_EFFECT = (  # fields that do not affect the computation, or that the tensors already imply
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules", "eva_config",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
)  # fmt: skip
READ = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern")
REPEATED = re.compile(r"\.(modules_to_save|original_module)\.")  # in names of tensors that are stored twice
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # values of init_lora_weights that do not change the base
WITH_LOGITS = ("translate", "lm", "mlm")  # tasks of models that project to the vocabulary
HEAD = "lm_head"  # the projection; PEFT ties only tables that are named embed_tokens or this
OF_LABELS = ("id2label", "label2id", "num_labels", "problem_type")
TASK_TYPES = {"translate": "SEQ_2_SEQ_LM", "lm": "CAUSAL_LM", "classify": "SEQ_CLS", "tag": "TOKEN_CLS",
              "qa": "QUESTION_ANS"}  # fmt: skip


def import_adapter(directory: Path, workdir: str, base: str) -> str:
    """Import an adapter of PEFT as a run of adapters whose base is the run `base`, and return a summary.

    Raises UserError for anything but LoRA of kernels, and for tensors without a place in the base.
    """
    if processes.process_count() > 1:
        raise UserError(
            f"{directory}: one process imports an adapter: leave out --coordinator, --processes and --process"
        )
    target = new_directory(workdir, "--workdir=")
    if not base:
        name = vocabulary.read_json(directory / CONFIG).get("base_model_name_or_path", "")
        raise UserError(f"{directory}: adapts {name!r}: import that, too, and name its run with --base=DIR")
    run, mesh = read_run(base), make_mesh(1)
    config, tokenizers, origin = run.config, run.tokenizers, run.origin
    family, _ = express(config.task, run.model, base, origin=origin.get("model_type", ""))
    with explained(directory):
        fields = vocabulary.read_json(directory / CONFIG)
        refuse_other_methods(fields)
        if not (directory / WEIGHTS).is_file():
            raise UserError(f"{directory}: has no {WEIGHTS}: save the adapter with safe_serialization=True")
        source = tensors.Tensors(directory / WEIGHTS, functools.partial(module_names, family))
        task = next((task for task in LABELLED if TASK_TYPES[task] == fields.get("task_type")), "")
        if config.task == "mlm" and task and origin.get("files"):
            config, tokenizers = _with_head(task, family, run, source)
        parent, model = load_parent(base, mesh), sized(config, tokenizers).merged
        table = table_of(family, model, config.task)
        shapes = flatten_dict(abstract_params(build_model(model), mesh), sep="/")
        adapters = Reading(source, fields, shapes, tied_tables(family, table, model, config.task)).adapters(table)
        adapters = standardized(adapters, tokenizers[1])
        known = {*adapters, *flatten_dict(parent.params, sep="/")}
        if lacking := sorted(table[name].theirs for name in {*shapes} - known):
            raise UserError(f"{directory}: neither the adapter nor {base} has {', '.join(lacking[: tables.SHOWN])}: "
                            f"import a base for {fields.get('task_type')}, which has it")  # fmt: skip
    also = tuple(f"^{re.escape(name)}$" for name in adapters if not is_factor(name))
    kernels = sorted(name.replace(f"/{FACTORS[0]}/", "/") for name in adapters if f"/{FACTORS[0]}/" in name)
    rank = adapters[_factor(kernels[0], 0)].shape[-1]
    lora = LoraConfig(
        rank=rank,
        alpha=rank * scale_of(fields),
        dropout=float(fields.get("lora_dropout") or 0),
        kernels=f"^({'|'.join(map(re.escape, kernels))})$",
        also=also,
    )
    plain = dataclasses.asdict(config)
    plain["model"]["lora"] = dataclasses.asdict(lora)
    plain["train"] |= {"init_from": str(run.path), "source_vectors": "", "target_vectors": ""}
    plain["evaluate"]["weights"] = "last"  # there are no others
    config = name_parent(resolve(plain))
    write_run(target, config, tokenizers, unflatten_dict(adapters, sep="/"), parent.digest)
    run.copy_origin(target)
    whole = f"{len(also)} whole parameters, over {run.path}"
    return f"{target}: {len(kernels)} kernels with adapters of rank {rank}, {whole}"


def _with_head(
    task: str, family: HfFamily, run: StoredRun, source: tensors.Tensors
) -> tuple[Config, tuple[Tokenizer, Tokenizer]]:
    """Return config and tokenizers of a base that gets the head of an adapter; names of labels are unknown."""
    text, fields = run.tokenizers[0], parse_object(run.origin["files"][FIELDS])
    fields = {key: value for key, value in fields.items() if key not in OF_LABELS}
    fields["vocab_size"] = run.model.vocab_size  # which pruning and extending change
    found = read_model(family, fields, task, source)
    answers = read_answers(found)
    assert answers
    config, _ = make_config(found, (text, answers))
    return config, (text, answers)


def refuse_other_methods(fields: Fields) -> None:
    """Raise UserError for the first field that asks for more than factors beside frozen kernels."""
    if fields.get("peft_type") != "LORA":
        raise UserError(f"{CONFIG}: peft_type={fields.get('peft_type')!r} is not implemented: only 'LORA'")
    if fields.get("init_lora_weights", True) not in INITIAL:
        raise UserError(f"{CONFIG}: init_lora_weights={fields['init_lora_weights']!r} changes the base: convert the "
                        "adapter with PEFT's path_initial_model_for_weight_conversion")  # fmt: skip
    for key, value in fields.items():
        if value and key not in (*READ, *WITHOUT_EFFECT, "peft_type", "init_lora_weights"):
            raise UserError(f"{CONFIG}: {key}={value!r} is not implemented: only factors beside kernels are")


def module_names(family: HfFamily, names: Collection[str]) -> dict[str, str]:
    """Return the name in the model of each tensor of an adapter; a bias beside factors is that of their module."""
    plain = [name.removeprefix(PREFIX).replace(".base_layer.", ".") for name in names]
    return dict(zip(names, renamed(family, plain).values(), strict=True))


def scale_of(fields: Fields, module: str = "", rank: int = 0) -> float:
    """Return the scale of the product of a module's factors."""
    rank, alpha = rank or fields.get("r", 8), fields.get("lora_alpha", 8)
    for pattern, value in (fields.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    return float(alpha / (rank**0.5 if fields.get("use_rslora") else rank))


def tied_tables(family: HfFamily, table: Table, model: ModelConfig, task: str) -> dict[str, list[str]]:
    """Return a table of tokens → the tensors of theirs that are tied to it."""
    if is_bare(model, task):
        return {}
    own = {entry.theirs for entry in table.values()}
    found = {
        path: [copy for copy, first in family.copies.items() if first == entry.theirs and copy not in own]
        for path, entry in table.items()
        if task in WITH_LOGITS and path.endswith("embedding/embedding")
    }
    return {path: copies for path, copies in found.items() if copies}


def module_of(entry: Entry) -> str:
    """Return the name of the module of one of their tensors; `{}` stands for a layer."""
    return entry.theirs.rpartition(".")[0]


class Order(NamedTuple):
    """Where a kernel of ours [d f] is in theirs."""

    inputs: NDArray[np.int64]  # [d]: the number there of each input
    outputs: NDArray[np.int64]  # [f]
    turned: bool  # theirs is [out in]


def order_of(entry: Entry, shape: tuple[int, ...]) -> Order | None:
    """Return the order that reading brings a kernel of this shape [d f] into; None if theirs is not a matrix."""
    for turned in (True, False):
        sizes = np.array([shape[0], shape[1] * entry.parts])
        numbers = [np.broadcast_to(np.expand_dims(np.arange(n), 1 - axis), sizes) for axis, n in enumerate(sizes)]
        try:
            inputs, outputs = (entry.read(each.T if turned else each) for each in numbers)
        except ValueError:  # such as a width that cannot be split into the parts of the other axis
            continue
        if inputs.shape == shape and len({*inputs[:, 0].tolist()}) == shape[0]:
            return Order(inputs[:, 0], outputs[0], turned)
    return None


def _factor(kernel: str, which: int) -> str:
    return f"{kernel.removesuffix('kernel')}{FACTORS[which]}/kernel"


def _layers(entry: Entry, leaf: Any) -> range:
    return range(len(leaf)) if "{}" in entry.theirs else range(1)


class Reading:
    """The tensors of an adapter as our parameters."""

    def __init__(
        self, source: tensors.Tensors, fields: Fields, shapes: Mapping[str, Any], tied: Mapping[str, list[str]]
    ) -> None:
        """Take the tensors, adapter_config.json, the parameters of the base by name, and its tied tables."""
        self._source, self._fields, self._shapes, self._tied = source, fields, shapes, tied
        self._read = set[str]()

    def adapters(self, table: Table) -> dict[str, np.ndarray]:
        """Return name → factors and whole parameters. Raise UserError for tensors that have no place, or no partner."""
        kernels = {path: entry for path, entry in table.items() if path.endswith("/kernel")}
        found = {path: layers for path, entry in kernels.items() if (layers := self._factors(path, entry))}
        if not found:
            raise UserError(f"{WEIGHTS}: has no factors of a kernel of the base; is --base another model's run?")
        most = max(a.shape[1] for layers in found.values() for a, _ in layers.values())
        adapters: dict[str, np.ndarray] = {}
        for path, layers in found.items():
            shape = self._shapes[path].shape
            a, b = (np.zeros((*shape[:-2], *size), np.float32) for size in ((shape[-2], most), (most, shape[-1])))
            for layer, (own_a, own_b) in layers.items():
                at = layer if len(shape) > 2 else ...
                a[at, :, : own_a.shape[1]] = own_a
                b[at, : own_b.shape[0], :] = own_b
            adapters |= {_factor(path, 0): a, _factor(path, 1): b}
        adapters |= self._whole(table)
        if left := sorted(name for name in {*self._source.found} - self._read if not REPEATED.search(name)):
            raise UserError(
                f"{WEIGHTS}: {', '.join(left[: tables.SHOWN])} have no place beside the kernels of the base"
            )
        return adapters

    def _factors(self, path: str, entry: Entry) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return layer → both factors [in r] and [r out] of a kernel, scaled as ours are."""
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        shape = self._shapes[path].shape[-2:]
        order = order_of(entry, shape)
        if order is None:
            return found
        for layer in _layers(entry, self._shapes[path]):
            module = module_of(entry).format(layer)
            names = [f"{module}.lora_{letter}.weight" for letter in "AB"]
            if not {*names} <= {*self._source.found}:
                continue
            self._read |= {*names}
            a, b = (self._source.read(name).T for name in names)
            if (len(a), b.shape[1:], a.shape[1:]) != (shape[0], (shape[1] * entry.parts,), b.shape[:1]):
                raise UserError(f"{names[0]} {a.T.shape} and its B have no place beside our {path} {shape}")
            ratio = scale_of(self._fields, module, a.shape[1]) / scale_of(self._fields)
            found[layer] = a[order.inputs], b[:, order.outputs] * np.float32(ratio)
        return found

    def _whole(self, table: Table) -> dict[str, np.ndarray]:
        """Return the parameters that the adapter holds whole, such as PEFT's modules_to_save and biases.

        Raises UserError for one of another shape, such as a table with further tokens, and for a tied table without
        its copies.
        """
        whole = {}
        for path, entry in table.items():
            names = [entry.theirs.format(layer) for layer in _layers(entry, self._shapes.get(path))]
            if entry.value is None and {*names} <= {*self._source.found}:
                self._read |= {*names}
                layers = [self._source.read(name, entry.read) for name in names]
                whole[path] = np.stack(layers) if "{}" in entry.theirs else layers[0]
                found = whole[path]
                if found.shape != (wanted := self._shapes[path].shape):
                    raise UserError(
                        f"{WEIGHTS}: {names[0]} gives {found.shape}, and our {path} has {wanted}: import the base that "
                        "the adapter was saved over, with as many tokens and classes"
                    )
                for copy in self._tied.get(path, ()):
                    self._read.add(copy)
                    if copy not in self._source.found or not np.array_equal(self._source.read(copy, entry.read), found):
                        remedy = (
                            f"train both with modules_to_save=['{HEAD}'] and ensure_weight_tying=True"
                            if "embed_tokens" not in copy  # which PEFT would make a linear layer
                            else "merge the adapter into the model and import that"
                        )
                        raise UserError(
                            f"{WEIGHTS}: replaces {names[0]} and not {copy}, which the base ties to it: {remedy}"
                        )
        return whole


def export_adapter(workdir: str, output: str | os.PathLike[str], base: str) -> str:
    """Write a run of adapters as a directory that PEFT loads over the model `base`, and return a summary.

    Raises UserError for a run without adapters, for parameters trained whole that are not all of a module, and for a
    table that PEFT does not tie as the model does.
    """
    run = read_run(workdir)
    config, model, lora = run.config, run.model, run.config.model.lora
    if not lora.rank:
        raise UserError(f"{workdir}: holds no adapters: leave out --adapter_of to export the model")
    target = new_disk_directory(output, "--output=")
    family, _ = express(config.task, model, workdir, origin=run.origin.get("model_type", ""))
    _, params = own_layers(model, load_saved(run.path, config, make_mesh(1)).params)
    answers, head = run.tokenizers[1], {"kernel", "bias"}
    whole_head = head <= {*params.get("classifier", {})}
    if isinstance(answers, NumberTokenizer) and (answers.mean, answers.deviation) != (0, 1) and not whole_head:
        raise UserError(
            f"{workdir}: model.lora.also={lora.also} leaves out a part of the classifier, which would give numbers "
            f"with their mean {answers.mean:g} and deviation {answers.deviation:g} in theirs: add '^classifier/', or "
            "export the merged model, without --adapter_of"
        )
    params = in_units(params, answers)
    table = table_of(family, model, config.task)
    saved = {name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep="/").items()}
    factors = list(their_factors(table, saved))
    layers = {name.partition("/")[0]: len(leaf) for name, leaf in saved.items() if is_factor(name) and leaf.ndim > 2}
    whole = {path: table[path] for path in saved if not is_factor(path)}
    modules = {module_of(entry) for entry in whole.values()}
    if parts := [path for path, entry in table.items() if module_of(entry) in modules and path not in whole]:
        raise UserError(f"{workdir}: model.lora.also={lora.also} trains a module without its {parts[0]}, "
                        "which PEFT cannot store: export the merged model, without --adapter_of")  # fmt: skip
    tied = {path: copies for path, copies in tied_tables(family, table, model, config.task).items() if path in whole}
    for path, copies in tied.items():
        if copies != [f"{HEAD}.weight"]:  # PEFT would make further tables linear layers
            raise UserError(f"{workdir}: model.lora.also={lora.also} trains {path}, which {copies[0]} shares: "
                            "export the merged model, without --adapter_of")  # fmt: skip
    modules |= {HEAD} if tied else set()
    written = [(f"{PREFIX}{name}.lora_{letter}.weight", array.T)
               for name, pair, _ in factors for letter, array in zip("AB", pair, strict=True)]  # fmt: skip
    own = dict(tables.to_tensors(whole, unflatten_dict({path: saved[path] for path in whole}, sep="/")))
    own |= {copy: own[table[path].theirs] for path, copies in tied.items() for copy in copies}
    written += [(f"{PREFIX}{name}", array) for name, array in own.items()]
    fields = adapter_fields(lora, table, {name: a.shape[1] for name, (a, _), _ in factors}, layers)
    fields |= {"fan_in_fan_out": not all(turned for *_, turned in factors)}
    fields |= {"base_model_name_or_path": base, "task_type": TASK_TYPES.get(config.task)}
    fields |= {"modules_to_save": sorted(modules) or None, "ensure_weight_tying": bool(tied)}
    with filling(target):
        size = tensors.write(target, written)
        (target / tensors.WHOLE).rename(target / WEIGHTS)
        (target / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    note = "; load the base in bfloat16, as it was in training" if lora.base_dtype != "float32" else ""
    return f"{target}: an adapter of {len(factors)} modules of {family.model_type}, {size / 1e6:,.1f} MB{note}"


def their_factors(
    table: Table, saved: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray], bool]]:
    """Yield (module, (A, B), turned) with A and B transposed, as ours are.

    A module of several kernels of ours has the factors of all: of one rank if all read the same A, else side by side.
    Raises UserError for a kernel that is not a matrix there.
    """
    together: dict[str, list[str]] = {}
    for path, entry in table.items():
        if path.endswith("/kernel") and _factor(path, 0) in saved:
            together.setdefault(module_of(entry), []).append(path)
    for module, kernels in together.items():
        for layer in _layers(table[kernels[0]], saved[_factor(kernels[0], 0)]):
            pairs, turned = [], True
            for path in kernels:
                a, b = (saved[_factor(path, i)][layer if "{}" in module else ...] for i in (0, 1))
                order = order_of(table[path], (len(a), b.shape[1]))
                if order is None:
                    raise UserError(f"model.lora.kernels: PEFT has no factors for {path}: export the merged model")
                their_a, their_b = np.empty_like(a), np.zeros((len(b), b.shape[1] * table[path].parts), np.float32)
                their_a[order.inputs], their_b[:, order.outputs] = a, b
                pairs.append((their_a, their_b))
                turned = order.turned
            if all(np.array_equal(a, pairs[0][0]) for a, _ in pairs):
                both = pairs[0][0], np.sum([b for _, b in pairs], axis=0)
            else:
                both = np.concatenate([a for a, _ in pairs], axis=1), np.concatenate([b for _, b in pairs])
            yield module.format(layer), both, turned


def adapter_fields(
    lora: LoraConfig, table: Table, ranks: Mapping[str, int], layers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the adapter_config.json of modules with factors of these ranks; `layers` are those of each stack."""
    ((rank, _),) = Counter(ranks.values()).most_common(1)
    other = {module: own for module, own in ranks.items() if own != rank}
    last = {module.rpartition(".")[2] for module in ranks}
    named = {
        module_of(entry).format(layer)
        for path, entry in table.items()
        for layer in range(layers.get(path.partition("/")[0], 1))
        if path.endswith("/kernel")
    }
    short = {module for module in named if module.rpartition(".")[2] in last} == {*ranks}
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": lora.scale * rank,
        "lora_dropout": lora.dropout,
        "rank_pattern": other,
        "alpha_pattern": {module: lora.scale * own for module, own in other.items()},
        "target_modules": sorted(last if short else ranks),
        "bias": "none",
        "inference_mode": True,
    }
