"""The lines that a run logs at its start: text, vocabulary, parameters, batches, attention, schedule and devices."""

from collections.abc import Iterator, Mapping, Sequence

from jax.sharding import Mesh

from jformer.config.options import Config
from jformer.data.data_config import DataConfig
from jformer.data.plan import Plan, Shape
from jformer.data.progress import counted
from jformer.data.sources.split import SIDES
from jformer.data.tokenizers import NUM_SYMBOLS, LabelTokenizer, NumberTokenizer, Tokenizer
from jformer.errors import UserError
from jformer.models import ModelConfig
from jformer.models.layers.kernels import calls_of, choose_kernel, is_own_attention
from jformer.parallel import processes
from jformer.parallel.backend import Target, target_of
from jformer.parallel.devices import Peak, products_line
from jformer.parallel.mesh import slices_line
from jformer.training.corpora import Data
from jformer.training.optim import schedule_line

SIZED = ("word", "bpe", "unigram")  # tokenizers whose vocabulary data.vocab_size limits


def introduction(
    config: Config, data: Data, notes: Sequence[str], parameters: int, mesh: Mesh, peak: Peak
) -> Iterator[str]:
    """Yield the lines.

    Args:
        config: of the run.
        data: its text.
        notes: lines about automatic choices and the origin of the state.
        parameters: how many the model has.
        mesh: of the devices.
        peak: FLOP/s of all devices together.
    """
    for name, corpus in data.texts.items():
        found = ", ".join(counted(count, reason) for reason, count in corpus.counts.items())
        yield f"{name}: {found}{too_long(corpus.counts)}"
    yield from (*data.repeats, *notes)
    note = "" if config.train.init_from else unfilled(config.data, data.tokenizers)  # tokenizers are copied then
    yield f"vocabulary: {vocabulary(*data.tokenizers)}{note}; parameters: {parameters:,}"
    yield f"batches: {len(data.batches):,} an epoch, {shapes(data.batches.plan)}"
    yield schedule_line(config.optim, config.train.num_steps, config.model.scale_width)
    device = target_of(mesh.devices.flat[0])
    yield f"devices: {mesh.size} x {device.kind}, at most {peak.flops / 1e12:.3g} TFLOP/s ({peak.origin})"
    yield from filter(None, [slices_line(mesh)])
    yield products_line(config.model.dtype, device, config.model.precision)


def kernel_line(
    model: ModelConfig,
    target: Target,
    shapes: Sequence[Shape],
    prefix: bool = False,
    sequence: int = 1,
    parts: int = 1,
) -> str:
    """Return a line on which attention kernels training uses, and why. All processes call it.

    Args:
        model: of the run.
        target: what its programs are compiled for.
        shapes: of batches, short to long.
        prefix: whether the source precedes the target in the same row.
        sequence: devices that share the positions of a row, which is padded to a multiple of them.
        parts: the number of devices and microbatches that share the rows and heads of a batch.

    Raises:
        UserError: the kernel of model.execution.attention_kernel cannot be used, padding the rows for mesh.sequence
            changes which weights are dropped, or the processes would use different kernels.
    """
    if model.recurrent.cell:
        return f"recurrent layers: {model.recurrent.cell}, attention: {model.recurrent.attention}"
    if not is_own_attention(model):
        return f"attention: {model.attention}"
    reasons: dict[str, str] = {}
    taken: dict[str, set[Shape]] = {}
    for shape in reversed(shapes):
        source, length = (-(-each // sequence) * sequence for each in shape[1:])
        if model.attention_dropout and (source, length) != shape[1:]:
            raise UserError(
                f"mesh.sequence={sequence} does not divide rows of {shape.source_length} + {shape.target_length}, and "
                f"model.attention_dropout={model.attention_dropout} depends on their lengths: set data.length_multiple="
                f"{sequence} in a new run, or mesh.sequence=1"
            )
        for call in calls_of(model, source, length, prefix):
            arrays = max(1, shape.rows * model.num_heads // parts)
            choice = choose_kernel(model, target, call._replace(arrays=arrays))
            reasons.setdefault(choice.kernel, choice.why)
            taken.setdefault(choice.kernel, set()).add(shape)
    chosen = "the attention kernels that they can use, unless model.execution.attention_kernel='own'"
    processes.check_same({chosen: sorted((kernel, len(found)) for kernel, found in taken.items())})
    asked = model.execution.attention_kernel
    other = next((kernel for kernel in taken if kernel != asked), "")
    if asked not in ("auto", "own") and other:
        raise UserError(
            f"model.execution.attention_kernel={asked!r} cannot be used everywhere: {reasons[other]}; use 'auto'"
        )
    count = len(shapes)
    return "attention kernel: " + ", ".join(
        f"{kernel} ({why})" + (f" for {len(taken[kernel])} of {count} shapes" if count > 1 else "")
        for kernel, why in reasons.items()
    )


def vocabulary(source: Tokenizer, target: Tokenizer) -> str:
    """Return the sizes of the vocabularies and the number of labels, as text."""
    if source is target:
        return f"{source.vocab_size:,}"
    if isinstance(target, LabelTokenizer):
        return f"{source.vocab_size:,}, {target.vocab_size - NUM_SYMBOLS:,} labels"
    if isinstance(target, NumberTokenizer):
        return f"{source.vocab_size:,}; labels are numbers"
    return f"{source.vocab_size:,} source, {target.vocab_size:,} target"


def too_long(counts: Mapping[str, int]) -> str:
    """Return a note if more than a hundredth of the examples is left out for its length, otherwise ""."""
    share = counts.get("overlong examples dropped", 0) / counts["examples read"]
    if share <= 0.01:
        return ""
    limits = "data.max_source_length or data.max_target_length"
    return f" ({share:.0%} are over {limits}; data.overlong='cut' in a new run keeps their beginnings)"


def unfilled(options: DataConfig, tokenizers: Sequence[Tokenizer]) -> str:
    """Return a note if a learned vocabulary is smaller than data.vocab_size, otherwise ""."""
    limit = options.vocab_size
    learned = [each.vocab_size for each in tokenizers if not isinstance(each, LabelTokenizer)]
    if options.tokenizer not in SIZED or all(size >= limit for size in learned):
        return ""
    return f" (the text does not fill data.vocab_size={limit:,})"


def shapes(plan: Plan) -> str:
    """Return the shapes of batches as text, without a side that is always empty."""
    found = ", ".join(f"{shape.rows} x {' + '.join(str(n) for n in shape[1:] if n)}" for shape in plan.shapes)
    return f"of rows x {' + '.join(side for side, n in zip(SIDES, plan.shapes[-1][1:], strict=True) if n)} = {found}"
