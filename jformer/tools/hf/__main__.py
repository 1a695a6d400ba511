"""Models of Hugging Face Transformers as runs of ours, and runs as such models; torch is not needed.

python -m jformer.hf import MODEL --workdir=DIR [--prefix=TEXT] [--source_language=X --target_language=Y]
       [--coordinator=HOST:PORT --processes=N --process=I]
python -m jformer.hf export DIR --output=MODEL_DIR [--family=TYPE]
python -m jformer.hf prune DIR --workdir=NEW --text FILE … [--target FILE …]
python -m jformer.hf extend DIR --workdir=NEW --tokens FILE …

import  reads config.json, generation_config.json, the tokenizer and safetensors, never pickle, of a directory, or of
        owner/name, which huggingface_hub fetches; DIR then is a run like any other: predict, evaluate, score, verify,
        describe and export it with jformer.main, or train another run from it with --config.train.init_from=DIR.
        Several processes, each started with its own I, share a large model out: each holds its part alone.
export  writes what transformers loads with from_pretrained; TYPE, such as marian, chooses among families that could.
prune   writes a run whose vocabulary keeps the special tokens and those of the files alone, one text a line.
extend  writes a run whose vocabulary has the tokens of the files, too, one a line; it knows them when it has trained.
  --text, --target   what the run reads, and what it is to write; more files than one may follow
  --prefix           put in front of every source text, such as "translate English to German: " (T5)
  --source_language, --target_language  as the tokenizer writes them: eng_Latn (NLLB), en_XX (mBART), en (M2M-100)
"""

import argparse
import sys
from pathlib import Path

from jformer.errors import DONE, LOST, MISTAKE, UserError
from jformer.storage import refusals_told

EXTRA = (
    "safetensors",
    "tokenizers",
)  # packages of the extra `hf`, without which some models can be read, and none written


def main(argv: list[str] | None = None) -> int:
    """Convert a model and return the exit code: 0, or 2 for a mistake that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m jformer.hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    reading, writing = commands.add_parser("import"), commands.add_parser("export")
    reading.add_argument("model")
    reading.add_argument("--workdir", required=True)
    for flag in ("prefix", "source_language", "target_language"):
        reading.add_argument(f"--{flag}", default="")
    reading.add_argument("--coordinator")
    for flag in ("processes", "process"):
        reading.add_argument(f"--{flag}", type=int)
    writing.add_argument("workdir")
    writing.add_argument("--output", type=Path, required=True)
    writing.add_argument("--family", default="")
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
        with refusals_told():
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
    """Do what the options ask for, and print what to tell of it; raise UserError for what cannot be done."""
    from jformer.parallel import processes
    from jformer.tools.hf.convert import Texts, import_model
    from jformer.tools.hf.extend import extend
    from jformer.tools.hf.hub import find_model
    from jformer.tools.hf.prune import prune
    from jformer.tools.hf.write_model import export_model

    if options.command == "import":
        texts = Texts(options.source_language, options.target_language, options.prefix)
        with processes.join_run(processes.from_flags(False, options.coordinator, options.processes, options.process)):
            with processes.main_process_first():
                directory = find_model(options.model)
            told = import_model(directory, options.workdir, texts)
            if processes.is_main_process():
                print(told)
    elif options.command == "prune":
        print(prune(options.old, options.workdir, options.text, options.target))
    elif options.command == "extend":
        print(extend(options.old, options.workdir, options.tokens))
    else:
        print(export_model(options.workdir, options.output, options.family))


if __name__ == "__main__":
    sys.exit(main())
