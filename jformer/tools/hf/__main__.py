"""Import models of Hugging Face Transformers as runs, and export runs as such models, without torch.

python -m jformer.hf import MODEL --workdir=DIR [--prefix=TEXT] [--source_language=X --target_language=Y]
       [--model_type=TYPE] [--tokenizer=MODEL_DIR] [--do_lower_case=false]
       [--coordinator=HOST:PORT --processes=N --process=I]
python -m jformer.hf import ADAPTER --workdir=DIR --base=BASE
python -m jformer.hf unpickle MODEL_DIR
python -m jformer.hf export DIR --output=MODEL_DIR [--family=TYPE | --adapter_of=MODEL]
python -m jformer.hf prune DIR --workdir=NEW --text FILE … [--target FILE …]
python -m jformer.hf extend DIR --workdir=NEW --tokens FILE …

import  reads config.json, generation_config.json, the tokenizer and safetensors (never pickle) from a directory, or
        from owner/name, fetched by huggingface_hub. DIR is then a run like any other: predict, evaluate, score,
        verify, describe and export it with jformer.main, or fine-tune it with --config.train.init_from=DIR.
        ADAPTER is a LoRA adapter of PEFT, and BASE the run that the model it adapts was imported as.
        Several processes, each started with its own I, shard a large model: each one reads only its part.
unpickle  writes safetensors beside pytorch_model.bin, for import; torch reads it in a process of its own, and only
        tensors: a file that holds anything else is refused, and none of it runs.
export  writes a directory for from_pretrained; TYPE, such as marian, selects one of several possible families. With
        --adapter_of, it writes the adapters of a run that trained them (model.lora) for PEFT, over MODEL.
prune   writes a run whose vocabulary keeps only the special tokens and the tokens of the files, one text a line.
extend  writes a run with further tokens, listed one a line; train it to learn them.
  --text, --target   files of texts that the run reads, and that it writes; each takes one file or more
  --prefix           prepended to every source text, such as "translate English to German: " (T5)
  --model_type       the family, such as bert, if config.json names none or an unknown one of the same architecture
  --tokenizer        the directory of the tokenizer's files, if they are not in that of the model
  --do_lower_case    whether BERT's tokenizer lowercases texts, if tokenizer_config.json does not say or is wrong
  --source_language, --target_language  as the tokenizer writes them: eng_Latn (NLLB), en_XX (mBART), en (M2M-100)
"""

import argparse
import sys
from pathlib import Path

from jformer.errors import DONE, LOST, MISTAKE, UserError
from jformer.storage import os_errors_as_user_errors

EXTRA = ("safetensors", "tokenizers")  # packages of the extra `hf`; some imports and all exports need them


def main(argv: list[str] | None = None) -> int:
    """Convert a model and return the exit code: 0, or 2 for a mistake that the user can fix."""
    parser = argparse.ArgumentParser(
        prog="python -m jformer.hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading, writing = commands.add_parser("import"), commands.add_parser("export")
    commands.add_parser("unpickle").add_argument("model", type=Path)
    reading.add_argument("model")
    reading.add_argument("--workdir", required=True)
    for flag in ("prefix", "source_language", "target_language"):
        reading.add_argument(f"--{flag}", default="")
    reading.add_argument("--tokenizer", type=Path)
    reading.add_argument("--do_lower_case", choices=("false", "true"))
    for flag in ("model_type", "base"):
        reading.add_argument(f"--{flag}", default="")
    reading.add_argument("--coordinator")
    for flag in ("processes", "process"):
        reading.add_argument(f"--{flag}", type=int)
    writing.add_argument("workdir")
    writing.add_argument("--output", required=True)
    as_what = writing.add_mutually_exclusive_group()
    as_what.add_argument("--family", default="")
    as_what.add_argument("--adapter_of", default="")
    pruning = commands.add_parser("prune")
    pruning.add_argument("old", metavar="workdir")
    pruning.add_argument("--workdir", required=True)
    pruning.add_argument("--text", type=Path, nargs="+", required=True)
    pruning.add_argument("--target", type=Path, nargs="+", default=[])
    extending = commands.add_parser("extend")
    extending.add_argument("old", metavar="workdir")
    extending.add_argument("--workdir", required=True)
    extending.add_argument("--tokens", type=Path, nargs="+", required=True)
    options = parser.parse_args(argv)
    from jformer.parallel import processes

    try:
        with os_errors_as_user_errors():
            do(options)
    except (UserError, processes.AbsentError) as error:
        print(f"jformer: {' '.join(str(error).split())}", file=sys.stderr)
        return error.code if isinstance(error, UserError) else LOST
    except ImportError as error:
        if error.name not in EXTRA:
            raise
        print(f"jformer: this needs the package {error.name}: pip install 'jformer[hf]'", file=sys.stderr)
        return MISTAKE
    return DONE


def do(options: argparse.Namespace) -> None:
    """Run the command and print its result; raise UserError if it cannot be done."""
    from jformer.parallel import processes
    from jformer.tools.hf.convert import Texts, import_model
    from jformer.tools.hf.embedding_rows import extend, prune
    from jformer.tools.hf.hub import find_model
    from jformer.tools.hf.peft import CONFIG, export_adapter, import_adapter
    from jformer.tools.hf.unpickle import unpickle
    from jformer.tools.hf.write_model import export_model

    if options.command == "import":
        texts = Texts(
            source_language=options.source_language, target_language=options.target_language, prefix=options.prefix,
            tokenizer=options.tokenizer, do_lower_case={"true": True, "false": False}.get(options.do_lower_case),
        )  # fmt: skip
        own = processes.from_flags(False, options.coordinator, options.processes, options.process)
        with processes.join_run(own), os_errors_as_user_errors():  # which all processes then print
            with processes.main_process_first():
                directory = find_model(options.model)
            if (directory / CONFIG).is_file():
                if options.model_type or texts != Texts():
                    raise UserError(f"{directory}: is an adapter; its model and its texts are those of --base")
                summary = import_adapter(directory, options.workdir, options.base)
            elif options.base:
                raise UserError(f"--base={options.base} is for adapters of PEFT, and {directory} has no {CONFIG}")
            else:
                summary = import_model(directory, options.workdir, texts, options.model_type)
            if processes.is_main_process():
                print(summary)
    elif options.command == "unpickle":
        print(unpickle(options.model))
    elif options.command == "prune":
        print(prune(options.old, options.workdir, options.text, options.target))
    elif options.command == "extend":
        print(extend(options.old, options.workdir, options.tokens))
    elif options.adapter_of:
        print(export_adapter(options.workdir, options.output, options.adapter_of))
    else:
        print(export_model(options.workdir, options.output, options.family))


if __name__ == "__main__":
    sys.exit(main())
