"""Is a model that another library trained worth fine-tuning here? SST-2 from a BERT that PyTorch trained.

A small BERT of transformers is trained on masked words of SST-2's training sentences by plain PyTorch; its directory is
imported, and the run fine-tuned with several seeds. Beside it the same model, imported before it was trained. Finished
work is not repeated. Needs `pip install -e ".[parity]"`.

Command:  python -m experiments.papers.finetune_imported --data=PATH/sst2 --workdir=runs/finetune [--updates=4000]
          [--seeds=3] [--smoke]
"""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from configs import sst2_bert
from experiments.measure import smoke_sizes
from experiments.runs import read_split, results_of, small_training
from jformer.tools.hf.convert import Texts, import_model

DATA = flags.DEFINE_string("data", None, "The folder of train.tsv, dev.tsv and test.tsv.", required=True)
WORKDIR = flags.DEFINE_string("workdir", None, "The folder of the models and runs.", required=True)
UPDATES = flags.DEFINE_integer("updates", 4_000, "Updates of the pretraining.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind, with seeds 0, 1, …", lower_bound=1)

VOCABULARY, LAYERS, WIDTH, HEADS, LONGEST = 6_000, 2, 128, 4, 64
ROWS, RATE, MASKED = 64, 1e-3, 0.15  # sentences of an update
KINDS = TRAINED, UNTRAINED = "trained", "untrained"
CHILD = {"num_layers": LAYERS, "d_model": WIDTH, "d_ff": 4 * WIDTH, "num_heads": HEADS, "max_length": LONGEST,
         "norm": "post", "embedding_norm": True, "dropout": 0.3, "head.num_segments": 2}  # fmt: skip
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main(_: list[str]) -> None:
    """Train what is missing and print the table."""
    smoke_sizes(updates=2, seeds=1)
    folder = Path(WORKDIR.value)
    if not (folder / KINDS[0] / "config.json").exists():
        pretrain(folder)
    rows = []
    for kind in KINDS:
        if not (folder / f"{kind}-imported" / "config.json").exists():
            print(import_model(folder / kind, str(folder / f"{kind}-imported"), Texts()), flush=True)
        accuracies = [score(folder, kind, seed) for seed in range(SEEDS.value)]
        spread = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
        each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
        rows.append(f"from the {kind} BERT: {statistics.mean(accuracies):.2f}{spread} % of the test sentences ({each})")
    print("\n".join(rows))


def pretrain(folder: Path) -> None:
    """Write the directory of a BERT before it is trained on masked words, and after that."""
    import tokenizers
    import torch
    import transformers

    lines = [pair.source for pair in read_split(sst2_bert, DATA.value, "train")]
    fast = tokenizers.BertWordPieceTokenizer()
    fast.train_from_iterator(lines, vocab_size=VOCABULARY, special_tokens=list(SPECIALS), show_progress=False)
    sentences = [fast.encode(line).ids[:LONGEST] for line in lines]
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=fast.get_vocab_size(), hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH, max_position_embeddings=LONGEST,
        )
    )  # fmt: skip
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
    for kind in KINDS:
        transformers.PreTrainedTokenizerFast(tokenizer_object=fast._tokenizer, **names).save_pretrained(folder / kind)
    model.save_pretrained(folder / UNTRAINED)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, UPDATES.value + 1, pct_start=0.1)
    rng, start = np.random.default_rng(0), time.perf_counter()
    for update in range(1, UPDATES.value + 1):
        ids, labels = masked([sentences[i] for i in rng.integers(0, len(sentences), ROWS)], len(fast.get_vocab()), rng)
        given, wanted = torch.tensor(ids), torch.tensor(labels)
        chosen = wanted >= 0  # logits of all the other tokens would take most of the time
        vectors = model.bert(given, attention_mask=given != 0)[0][chosen]
        loss = torch.nn.functional.cross_entropy(model.cls(vectors), wanted[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if update % 500 == 0 or update == UPDATES.value:
            print(f"PyTorch, update {update}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    model.save_pretrained(folder / TRAINED)


def masked(sentences: list[list[int]], words: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return ids [b t] with some masked (Devlin et al. 2019, section 3.1), and what they were; -100 for the others."""
    ids = np.zeros((len(sentences), max(map(len, sentences))), np.int64)
    for row, sentence in enumerate(sentences):
        ids[row, : len(sentence)] = sentence
    chosen = (rng.random(ids.shape) < MASKED) & (ids >= len(SPECIALS))
    kind = rng.random(ids.shape)
    labels = np.where(chosen, ids, -100)
    ids = np.where(chosen & (kind < 0.8), SPECIALS.index("[MASK]"), ids)
    return np.where(chosen & (kind > 0.9), rng.integers(len(SPECIALS), words, ids.shape), ids), labels


def score(folder: Path, kind: str, seed: int) -> float:
    """Return the accuracy of one run in percent, training it by its own command if needed."""
    options: dict[str, Any] = {"data.dir": DATA.value, "seed": seed, "train.init_from": folder / f"{kind}-imported"}
    options |= {f"model.{key}": value for key, value in CHILD.items()} | {"optim.learning_rate": 3e-4}
    if smoke_sizes():
        options |= {**small_training("train"), "train.eval_every": 2}
    results = results_of(sst2_bert, folder / f"{kind}-{seed}", options)
    return 100 * float(results["test"]["accuracy"]["score"])


if __name__ == "__main__":
    app.run(main)
