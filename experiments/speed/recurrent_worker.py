"""One side of experiments/speed/recurrent_speed.py, in a process and an environment of its own.

Command:  python -m experiments.speed.recurrent_worker jformer|torch    (recurrent_speed.py starts it)

The first line it reads is JSON that says what to build, and is answered with facts; every further one names what to do,
an "update" or a "decode" of a batch, and is answered with its seconds and its loss or how many tokens came out.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Told = dict[str, Any]
Work = dict[str, Callable[[], float]]  # what → does it, returns the loss or the tokens


def load_jformer(told: Told) -> tuple[Work, Told]:
    """Build the update of a training run, and what predict answers with."""
    import jax

    from experiments.speed.steps_jformer import build_step
    from jformer.config import resolve
    from jformer.data.tokenizers import NUM_SYMBOLS, learn
    from jformer.inference.predict import Predictor
    from jformer.inference.restore import Trained
    from jformer.tasks.build import build_sized, build_task
    from jformer.training.malloc import keep_freed_memory

    keep_freed_memory()
    tokens = told["new_tokens"]
    config = resolve(
        {
            "task": "lm",
            "model": {
                **{name: told[name] for name in ("num_layers", "d_model", "dropout")},
                "family": "decoder",
                "tied_output": False,
                "recurrent": {"cell": told["cell"]},
            },
            "data": {"dir": "nowhere", "tokenizer": "word"},
            "optim": {"label_smoothing": 0.0},
            "decode": {"beam_size": 1, "batch_size": told["rows"], "max_length": tokens, "forbid": ("</s>",)},
        }
    )
    words = [f"w{i}" for i in range(told["vocabulary"] - NUM_SYMBOLS)]
    tokenizer = learn("word", [" ".join(words)], told["vocabulary"], "identity", False)
    task, tokenizers = build_task(config), (tokenizer, tokenizer)
    model = build_sized(config, task, tokenizers)
    step, state, batch = build_step(model.config, arrays(told), told["warmup"], task)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    params = jax.tree.map(lambda leaf: leaf.copy(), state.params)  # an update takes those that it is given
    predictor = Predictor(Trained(config=config, task=task, tokenizers=tokenizers, model=model, params=params))
    prompts = [words[i] for i in range(told["rows"])]

    def update() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step(state, batch))
        loss = metrics.sums["loss"]
        return float(loss.total / loss.count)

    def decode() -> float:
        answers = predictor.predict(prompts)
        return sum(len(answer.split()) - 1 for answer in answers)

    return {"update": update, "decode": decode}, {"parameters": count, "versions": {"jax": jax.__version__}}


def load_torch(told: Told) -> tuple[Work, Told]:
    """Build the same of torch.nn's recurrent layers, as PyTorch's own word language model does."""
    import torch
    from torch import nn

    torch.set_num_threads(told["threads"])
    torch.manual_seed(0)
    d, vocabulary = told["d_model"], told["vocabulary"]
    layers = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[told["cell"]]
    embedding, drop = nn.Embedding(vocabulary, d), nn.Dropout(told["dropout"])
    core = layers(d, d, told["num_layers"], batch_first=True, dropout=told["dropout"])
    output = nn.Linear(d, vocabulary, bias=False)
    model = nn.ModuleList([embedding, drop, core, output])
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    slope = d**-0.5 * told["warmup"] ** -1.5
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: slope * (step + 1))
    batch = {name: torch.from_numpy(array) for name, array in arrays(told).items()}
    wanted = batch["target_out"].long().flatten()
    prompts = torch.arange(told["rows"])[:, None] + 4

    def update() -> float:
        model.train()
        optimizer.zero_grad()
        hidden, _ = core(drop(embedding(batch["target_in"])))
        loss = nn.functional.cross_entropy(output(drop(hidden)).flatten(0, 1), wanted)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    def decode() -> float:
        model.eval()
        tokens, state, found = prompts, None, []
        with torch.inference_mode():
            for _ in range(told["new_tokens"]):
                hidden, state = core(embedding(tokens), state)
                tokens = output(hidden[:, -1:]).argmax(-1)
                found.append(tokens)
        return float(torch.cat(found, 1).numel())

    count = sum(p.numel() for p in model.parameters())
    return {"update": update, "decode": decode}, {"parameters": count, "versions": {"torch": torch.__version__}}


def arrays(told: Told) -> dict[str, np.ndarray]:
    """Return a batch of full rows of random tokens."""
    rng, shape = np.random.default_rng(0), (told["rows"], told["length"])
    first, last = rng.integers(4, told["vocabulary"], (2, *shape)).astype(np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return {
        "row": np.arange(shape[0], dtype=np.int32),
        "target_in": first,
        "target_out": last,
        "target_segments": np.ones(shape, np.int32),
        "target_positions": np.ascontiguousarray(positions),
        "weights": np.ones(shape, np.float32),
    }


def main() -> None:
    """Answer line by line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    work: Work | None = None
    for line in sys.stdin:
        if work is None:
            work, answer = {"jformer": load_jformer, "torch": load_torch}[sys.argv[1]](json.loads(line))
        else:
            began = time.perf_counter()
            result = work[json.loads(line)["do"]]()
            answer = {"seconds": time.perf_counter() - began, "result": result}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
