"""All options with their defaults: the sections of a config, and the names of its choices.

The sections that belong to a room are defined there (data/data_config.py, models/model_config.py and
decoding/decode_config.py below jformer/); the others are here, and `Config` joins them. Plain frozen dataclasses:
`jformer.config.checks` decides whether values can work, alone and together.
"""

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jformer.data.data_config import DataConfig
from jformer.decoding.decode_config import DecodeConfig
from jformer.models.model_config import ModelConfig
from jformer.plugins import is_own

TASKS = {  # task → the families that can learn it
    "translate": ("encdec",),
    "lm": ("decoder",),
    "prefix_lm": ("decoder",),
    "mlm": ("encoder",),
    "denoise": ("encdec",),
    "classify": ("encoder", "vit"),
    "tag": ("encoder",),
    "caption": ("encdec",),
    "qa": ("encoder",),
    "embed": ("encoder", "decoder", "encdec"),
}
PARTS = (  # keys whose values may name a user-defined part; data.mixture has a source in each of its corpora
    *("task", "data.source", "data.tokenizer", "optim.optimizer", "optim.schedule", "optim.loss"),
    *("evaluate.scores", "evaluate.during"),
    *("model.attention", "model.feed_forward", "model.activation", "model.norm_type", "model.positions"),
    "decode.search",
)
ONE_PASS = ("classify", "tag", "qa", "embed", "mlm")  # tasks whose answers are not searched for
OF_TOKENS = ("translate", "lm", "prefix_lm", "mlm", "denoise")  # tasks whose loss is a sum over tokens
OF_IMAGES = ("caption",)  # tasks whose source is an image and never a text
READERS = {  # option → the tasks that read it, for options that only a few read
    **dict.fromkeys(("data.labels", "data.label_weights"), ("classify",)),
    **dict.fromkeys(("data.doc_stride", "decode.max_answer_length", "decode.no_answer_threshold"), ("qa",)),
    **dict.fromkeys(("optim.temperature", "optim.symmetric"), ("embed",)),
    **dict.fromkeys(("data.language_symbols", "decode.source_language", "decode.target_language"), ("translate",)),
    "data.bpe_dropout": ("translate", "lm"),
    "model.head.crf": ("tag",),
}
OPTIMIZERS = ("adam", "adamw", "adafactor")
OPEN_SCHEDULES = ("noam", "inverse_square_root", "t5", "constant")  # rates do not depend on num_steps; your own may
ENDING_SCHEDULES = ("cosine", "linear", "warmup_stable_decay")  # rates do, so a run cannot be extended
SCHEDULES = (*OPEN_SCHEDULES, *ENDING_SCHEDULES)
TEXT_SCORES = ("bleu", "chrf", "ter")
# For all other metrics, higher is better.
LOWER_IS_BETTER = ("loss", "nll", "perplexity", "ter", "bits_per_character", "mean_squared_error")
TRACKERS = ("wandb", "mlflow")
TEST_SCORES = {  # task → the scores of a test set in results.json; text scores only if in evaluate.scores
    "translate": (*TEXT_SCORES, "exact_match", "token_accuracy", "perplexity"),
    "lm": ("bits_per_character", "token_accuracy", "perplexity"),
    "prefix_lm": (*TEXT_SCORES, "exact_match", "token_accuracy", "perplexity"),
    "mlm": ("accuracy", "perplexity"),
    "denoise": ("token_accuracy", "perplexity"),
    "tag": ("span_f1", "span_precision", "span_recall", "accuracy", "macro_f1", "exact_match", "perplexity"),
    "caption": (*TEXT_SCORES, "cider", "exact_match", "token_accuracy", "perplexity"),
    "qa": ("exact_match", "f1", "perplexity"),
    "embed": ("retrieval_accuracy",),
}
LABEL_SCORES = {  # data.labels → the same for task classify
    "one": ("accuracy", "macro_f1", "perplexity"),
    "several": ("exact_match", "micro_f1", "macro_f1"),
    "number": ("pearson", "spearman", "mean_squared_error"),
}
SCORES = tuple(dict.fromkeys(name for names in (*TEST_SCORES.values(), *LABEL_SCORES.values()) for name in names))
OF_LOSSES = ("accuracy", "token_accuracy", "perplexity", "bits_per_character")  # scores that need no answers
# Keys beside the scores of a test set or of a row of metrics.jsonl.
BESIDE_SCORES = ("examples", "counts", "checksum", "languages", "trained", "settings", "set", "step", "split")
WEIGHTS = ("last", "best", "average", "ema")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate.

    The defaults are those of Vaswani et al. 2017, section 5.3, except for clipping, which the paper does not use.
    """

    loss: str = "task"  # task: that of the task; your own makes the sums of `tasks.task.TaskLoss`
    optimizer: str = "adam"  # adam | adamw | adafactor (reads only the rate and clip_norm)
    # noam | inverse_square_root | t5 | constant | cosine | linear | warmup_stable_decay; all but t5 rise linearly first
    schedule: str = "noam"
    # The peak; noam: a factor of d_model^-0.5 · min(step^-0.5, step · warmup^-1.5) (equation 3).
    learning_rate: float = 1.0
    warmup: float = 4_000.0  # updates (section 5.3); below 1, a share of num_steps. t5: those before the rate falls
    decay: float = 0.1  # warmup_stable_decay: updates of the final decay (Hu et al. 2024); below 1, a share
    final_rate: float = 0.0  # cosine, linear, warmup_stable_decay: the rate just after the end, as a share of the peak
    b1: float = 0.9  # adam, adamw: decay of the mean of gradients at each update (Kingma and Ba 2015, algorithm 1)
    b2: float = 0.98  # the same for the mean of squares; Adam's own 0.999 forgets 20 times as slowly (section 5.3)
    epsilon: float = 1e-9  # added to the root of that mean before dividing, which bounds the steps (section 5.3)
    weight_decay: float = 0.0  # adamw, on matrices only (Loshchilov and Hutter 2019)
    # Of the global gradient norm (Pascanu et al. 2013); 0 = off. It costs nothing and protects a run from a bad batch.
    clip_norm: float = 1.0
    # The probability spread evenly over all classes: it hurts perplexity but improves BLEU (section 5.4).
    label_smoothing: float = 0.1
    # embed: divides the cosines of texts (van den Oord et al. 2018); smaller = only the nearest other texts count. 0.05
    # is that of Gao et al. 2021, section 3.
    temperature: float = 0.05
    symmetric: bool = False  # embed: each text of a pair must find the other, not only the first the second
    r_drop: float = 0.0  # alpha of R-Drop: two passes with different dropout must agree (Liang et al. 2021)

    @property
    def passes(self) -> int:
        """Passes of an update over each of its rows, forward and backward."""
        return 2 if self.r_drop else 1

    def warmup_steps(self, num_steps: int) -> int:
        """Return the number of warm-up updates of a run of num_steps updates."""
        return _updates(self.warmup, num_steps)

    def ramp_steps(self, num_steps: int) -> int:
        """Return the number of warm-up updates, plus those of the decay of a warmup_stable_decay."""
        decay = self.decay_steps(num_steps) if self.schedule == "warmup_stable_decay" else 0
        return self.warmup_steps(num_steps) + decay

    def decay_steps(self, num_steps: int) -> int:
        """Return the number of decay updates at the end of a warmup_stable_decay."""
        decay = _updates(self.decay, num_steps)
        shares = self.warmup < 1 and self.decay < 1 and self.warmup + self.decay <= 1
        return min(decay, num_steps - self.warmup_steps(num_steps)) if shares else decay  # both may be rounded up


def _updates(count_or_share: float, num_steps: int) -> int:
    return round(count_or_share * (num_steps if count_or_share < 1 else 1))


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long to train, what to keep and what to start from. Counts are updates."""

    num_steps: int = 100_000  # updates of the whole run, including those before a restart
    num_epochs: float = 0.0  # passes over the training text: sets num_steps; a given num_steps is the limit
    max_minutes: float = 0.0  # of training, over all restarts; then it ends as after num_steps; 0 = no limit
    log_every: int = 100  # updates between rows of metrics.jsonl and logged lines
    eval_every: int = 1_000  # validation loss and sample translations; 0 = never
    checkpoint_every: int = 1_000  # must divide eval_every, so that the best evaluation has a checkpoint
    checkpoint_minutes: float = 0.0  # also save, with a row, when the last save is this long ago; 0 = by updates only
    # Newest checkpoints kept, with evaluate.weights='average' at least evaluate.average_last; the best one is kept too.
    # In a bucket, or with several processes, at least 2: there a new one is not read back, and might be damaged.
    keep_last: int = 5
    patience: int = 0  # stop after this many consecutive evaluations without a better one; 0 = never
    best_by: str = "loss"  # the metric that selects the best evaluation: loss | accuracy | a score of evaluate.during
    accumulation: int = 1  # microbatches of one update, for batches that do not fit the memory at once
    ema_decay: float = 0.0  # moving average of parameters beside the trained ones (Polyak and Juditsky 1992); 0 = off
    max_skipped: int = 10  # stop after this many consecutive updates that were not finite
    # Another run's workdir: start from its parameters with a fresh optimizer, and a fresh head for another task or
    # other labels.
    init_from: str = ""
    # A file of word vectors that the source embedding begins with (Mikolov et al. 2013; Pennington et al. 2014).
    source_vectors: str = ""
    target_vectors: str = ""  # the same for the target embedding; one table that both sides share takes either
    freeze: tuple[str, ...] = ()  # regular expressions over parameter names; what they match is not trained
    samples: int = 3  # validation sentences translated at every evaluation; 0 = none
    trackers: tuple[str, ...] = ()  # services that get the rows, too: wandb, mlflow; each needs the extra of its name
    profile_steps: str = ""  # "10:13" = trace updates 10, 11, 12 and 13 into WORKDIR/profile; "" = none
    # A process that makes no progress for this long ends the run; 0 = the time of 10 updates, at least a minute. Phases
    # that were never timed (compiling, validating, saving), or took half of that, have ten times as long, and a busy
    # processor counts as progress there; a single process has no limit there.
    stall_seconds: float = 0.0
    # FLOPs a second of a device, to compute MFU (Chowdhery et al. 2022); 0 = its data sheet's, or measured.
    peak_flops: float = 0.0

    def profiled(self) -> range:
        """Return the updates to trace, counted from 1."""
        first, _, last = self.profile_steps.partition(":")
        return range(int(first), int(last) + 1) if self.profile_steps else range(0)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """How the test sets are scored."""

    weights: str = "last"  # last | best | average (of average_last checkpoints) | ema
    average_last: int = 5  # the newest checkpoints in a row, or all if fewer (Vaswani et al. 2017, section 6.1)
    # bleu (Papineni et al. 2002) | chrf (Popović 2015) | ter (Snover et al. 2006), which takes by far the longest; by
    # sacreBLEU (Post 2018). Exact match and perplexity are always reported.
    scores: tuple[str, ...] = ("bleu", "chrf")
    # Scores of greedy answers at every evaluation while training, such as ("bleu",): those of a test set except token
    # accuracy, perplexity and bits per character, and your own for tasks that write text.
    during: tuple[str, ...] = ()
    during_examples: int = 500  # examples from the start of data.valid
    # A program of yours that scores texts, such as "python comet.py", or several with "; " between them: each is known
    # by its file's name, comet, to evaluate.during, decode.mbr_utility and decode.rerank. See docs/parts.md.
    command: str = ""
    command_seconds: float = 3_600.0  # time limit of each start of a command; 0 = no limit
    # sacreBLEU's tokenization (Post 2018); "none" for text that is tokenized already; auto: the one that it recommends
    # for data.target_language (zh, ja-mecab, ko-mecab; char for Thai and without MeCab; 13a for all others)
    tokenize: str = "auto"
    lowercase: bool = False  # BLEU and chrF compare without case, as some papers do; the signature shows it


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices are laid out; their number is the product of the four. Results differ only by rounding."""

    data: int = -1  # parts that split the rows, each with all parameters; -1 = all remaining devices
    # Devices that split the positions of the same rows in training: long ones, each with all parameters (Jacobs et al.
    # 2023, DeepSpeed-Ulysses); at most model.num_kv_heads.
    sequence: int = 1
    # Devices of a part that split its rows, and store parameters and optimizer split among them (Rajbhandari et al.
    # 2020); or -1.
    fsdp: int = 1
    # Devices that work together on the same rows: heads, parts of d_ff and vocabulary (Shoeybi et al. 2019).
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    seed: int = 0  # of parameters, dropout and the order of the data
    # translate | lm | prefix_lm | mlm | denoise | classify | tag | caption | qa | embed
    task: str = "translate"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()

    def of_test_set(self, key: str) -> "Config":
        """Return the config with the corpus of a test set as the first one: its language is used to score texts."""
        part, _ = self.data.test_sets()[key]
        return dataclasses.replace(self, data=self.data.of(part))


def score_commands(evaluate: EvaluateConfig) -> dict[str, str]:
    """Return name → command of evaluate.command: the name of its first file with an ending, else of its program.

    Raises ValueError for unclosed quotes, and for names that are not distinct from each other and from built-in ones.
    """
    found: dict[str, str] = {}
    for command in _split(evaluate.command):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(
                f"{error} in {command!r}; ';' separates commands, also within quotes: use a script"
            ) from error
        name = PurePath(next((word for word in words if re.search(r"\.[a-zA-Z]+$", word)), words[0])).stem
        if name in (*found, *SCORES, *LOWER_IS_BETTER):
            raise ValueError(f"another score is named {name!r}, too: rename its file")
        found[name] = command
    return found


def final_scores(config: Config) -> tuple[str, ...]:
    """Return the names of a test set's scores; of text scores, only those in evaluate.scores and of commands."""
    names = _test_scores(config)
    own = (*filter(is_own, config.evaluate.scores), *score_commands(config.evaluate))
    own = own if set(names) & {*TEXT_SCORES} else ()
    return (*(name for name in names if name not in TEXT_SCORES or name in config.evaluate.scores), *own)


def scores_during(config: Config) -> tuple[str, ...]:
    """Return the names of the answer scores possible during training; none for tasks without answers."""
    names = TEST_SCORES["translate"] if is_own(config.task) else _test_scores(config)  # your own may write text
    return tuple(name for name in names if name not in OF_LOSSES)


def _test_scores(config: Config) -> tuple[str, ...]:
    return LABEL_SCORES[config.data.labels] if config.task == "classify" else TEST_SCORES.get(config.task, ())


def changed(config: Config) -> dict[str, tuple[object, object]]:
    """Return dotted key → (value, default) of the options of a config that are not the default."""
    own, default = (flatten(dataclasses.asdict(each)) for each in (config, Config()))
    return {key: (value, default.get(key, "")) for key, value in own.items() if value != default.get(key)}


def own_parts(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the `package.module:function` parts that dotted keys name; values need not be valid."""
    mixture = flat.get("data.mixture", ())
    corpora = mixture if isinstance(mixture, tuple | list) else ()
    values = [flat.get(key) for key in PARTS] + [each.get("source") for each in corpora if isinstance(each, Mapping)]
    names = (name for value in values for name in (value if isinstance(value, tuple | list) else (value,)))
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str) and is_own(name)))


def named_code(flat: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts and the commands that dotted keys name; values need not be valid."""
    return (*own_parts(flat), *_split(str(flat.get("evaluate.command", ""))))


def _split(commands: str) -> list[str]:
    return [command.strip() for command in commands.split(";") if command.strip()]


def flatten(tree: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping as dotted key → value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
