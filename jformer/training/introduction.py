"""What a run says before its first update: what is about to be trained, on what, and what it will take."""

from collections.abc import Sequence

from jformer.data.corpus import SIDES
from jformer.data.data_config import DataConfig
from jformer.data.plan import Plan
from jformer.data.progress import counted
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer, NumberTokenizer, Tokenizer
from jformer.models.parts import count_params
from jformer.parallel.devices import Peak
from jformer.training.forecast import say_memory
from jformer.training.log import TrainingLog
from jformer.training.optim import schedule_line
from jformer.training.run import Run

SIZED = ("word", "bpe", "unigram")  # tokenizers that data.vocab_size limits


def introduce(run: Run, log: TrainingLog, peak: Peak) -> None:
    """Say it."""
    data, plan, train = run.data, run.data.batches.plan, run.config.train
    log.show_config()
    for name, corpus in data.texts.items():
        log.say(f"{name}: " + ", ".join(counted(count, reason) for reason, count in corpus.counts.items()))
    for note in [*data.repeats, *run.notes]:
        log.say(note)
    if log.rows != run.progress.rows:
        log.say(
            f"metrics.jsonl is damaged: {run.progress.rows} rows were written until here, it has {log.rows} of them"
        )
    # A child's vocabulary is its parent's.
    note = "" if train.init_from else unfilled(run.config.data, data.tokenizers)
    log.say(f"vocabulary: {vocabulary(*data.tokenizers)}{note}; parameters: {count_params(run.state.params):,}")
    log.say(f"batches: {len(data.batches):,} an epoch, {shapes(plan)}")
    log.say(schedule_line(run.config, run.schedule))
    kind = run.mesh.devices.flat[0].device_kind
    log.say(f"devices: {run.mesh.size} x {kind}, at most {peak.flops / 1e12:.3g} TFLOP/s ({peak.origin})")
    if run.finished:
        log.say(f"already trained to update {run.progress.step}")
        return
    say_memory(run, log)
    profiled = train.profiled()
    if profiled and profiled[-1] <= run.progress.step:
        log.say(f"train.profile_steps={train.profile_steps!r} are updates of the past: none is traced")
    if run.progress.step:
        log.say(f"resuming at update {run.progress.step} of {train.num_steps}")


def vocabulary(source: Tokenizer, target: Tokenizer) -> str:
    """Return how many entries the vocabularies have, and how many labels there are."""
    if source is target:
        return f"{source.vocab_size:,}"
    if isinstance(target, LabelTokenizer):
        return f"{source.vocab_size:,}, {target.vocab_size - NUM_SYMBOLS:,} labels"
    if isinstance(target, NumberTokenizer):
        return f"{source.vocab_size:,}; labels are numbers"
    return f"{source.vocab_size:,} source, {target.vocab_size:,} target"


def unfilled(options: DataConfig, tokenizers: Sequence[Tokenizer]) -> str:
    """Return a note where a vocabulary that was learned from the text has fewer entries than it might have."""
    asked = options.vocab_size
    learned = [each.vocab_size for each in tokenizers if not isinstance(each, LabelTokenizer)]
    if options.tokenizer not in SIZED or all(size >= asked for size in learned):
        return ""
    return f" (the text does not fill data.vocab_size={asked:,})"


def shapes(plan: Plan) -> str:
    """Return the shapes of batches, without a side that holds nothing."""
    found = ", ".join(f"{shape.rows} x {' + '.join(str(n) for n in shape[1:] if n)}" for shape in plan.shapes)
    return f"of rows x {' + '.join(side for side, n in zip(SIDES, plan.shapes[-1][1:], strict=True) if n)} = {found}"
