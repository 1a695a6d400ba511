"""Convert `pytorch_model.bin` to safetensors: torch unpickles it in a process of its own, and only tensors.

A pickle can run any code. `weights_only` of torch 2.6 and later builds nothing but tensors and plain containers, and
raises at the first other name. Run as a script, this file imports neither jformer nor JAX.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

PICKLE, PICKLES = "pytorch_model.bin", "pytorch_model.bin.index.json"


def unpickle(directory: Path) -> str:
    """Write safetensors beside the pickled weights of a model, and return a summary.

    Raises UserError without pickled weights, where safetensors are there already, without torch, and for a pickle that
    holds anything but tensors.
    """
    from jformer.errors import UserError
    from jformer.tools.hf.tensors import INDEX, WHOLE, read_header
    from jformer.tools.hf.vocabulary import read_json

    if importlib.util.find_spec("torch") is None:
        raise UserError("this needs the package torch: pip install 'jformer[torch]'")
    if (directory / WHOLE).exists() or (directory / INDEX).exists():
        raise UserError(f"{directory}: has safetensors already; import reads them")
    index = read_json(directory / PICKLES, {})
    places = index.get("weight_map") if index else {"": PICKLE}
    if not isinstance(places, dict) or any(Path(str(file)).name != file for file in places.values()):
        raise UserError(f"{directory / PICKLES}: must map each tensor to a file beside it; fetch it again")
    renamed = {file: WHOLE if file == PICKLE else f"{Path(file).stem}.safetensors" for file in places.values()}
    for file, target in renamed.items():
        done = subprocess.run(
            [sys.executable, "-P", __file__, str(directory / file), str(directory / target)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"{directory / file}: was not converted, and nothing in it was executed ({reason})")
    if index:
        weight_map = {name: renamed[file] for name, file in places.items()}
        (directory / INDEX).write_text(json.dumps({**index, "weight_map": weight_map}, indent=2) + "\n")
    count = sum(len(read_header(directory / target)) for target in renamed.values())
    return f"{directory}: {count} tensors of {', '.join(renamed)} are in {', '.join(renamed.values())}; import it now"


def convert(source: str, target: str) -> None:
    """Write the tensors of a pickle as safetensors; exit with a line if there is anything else in it."""
    import torch
    from safetensors.torch import save_file

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        sys.exit(f"torch {torch.__version__} can run code despite weights_only: install 2.6 or later")
    try:
        found = torch.load(source, map_location="cpu", weights_only=True)
        other = next((name for name, value in found.items() if not isinstance(value, torch.Tensor)), None)
        if other is not None:
            sys.exit(f"{other!r} in it is not a tensor")
        # Copied, as safetensors refuses tensors that share their memory.
        save_file({name: value.detach().clone().contiguous() for name, value in found.items()}, f"{target}.part")
    except Exception as error:  # torch raises errors of many kinds; the first recommends loading the file anyway
        reason = re.search(r"WeightsUnpickler error: (.+)", str(error))
        sys.exit(reason[1] if reason else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    Path(f"{target}.part").replace(target)


if __name__ == "__main__":
    convert(*sys.argv[1:])
