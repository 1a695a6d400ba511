"""A run, opened, checked and built: text, model, optimizer, compiled steps, newest checkpoint. Nothing is trained."""

import dataclasses
import functools
from collections import Counter

from etils.epath import Path
from jax.sharding import Mesh

from jformer.checkpoints.checkpoint import Checkpoints
from jformer.config import checks, load_config, resolve
from jformer.config.options import TEXT_SCORES, Config
from jformer.config.resume import resume_config
from jformer.data.progress import show_progress
from jformer.data.sources import open_split
from jformer.data.sources.split import Split
from jformer.data.tokenizers import Tokenizer
from jformer.errors import UserError
from jformer.evaluation.split_loss import EvalStep, make_eval_step
from jformer.inference.generation import writable
from jformer.inference.predict import Predictor
from jformer.inference.restore import Trained, member_config
from jformer.parallel import processes
from jformer.parallel.sharding import row_shards
from jformer.tasks.build import build_sized, build_task, choose_dtype, open_mesh
from jformer.tasks.tag import refuse_scores_of_spans
from jformer.tasks.task import CLASSES, Score, Task, make_loss
from jformer.training.corpora import Data, fingerprints, open_data
from jformer.training.finiteness import Examination
from jformer.training.optim import Schedule, build_optimizer
from jformer.training.state import Progress, TrainState, create_state, open_state
from jformer.training.step import TrainStep, make_train_step, trained_loss


@dataclasses.dataclass
class Run:
    """A run, built."""

    config: Config
    mesh: Mesh
    data: Data
    schedule: Schedule
    train_step: TrainStep
    examination: Examination  # of updates that are skipped
    eval_step: EvalStep
    sampler: Predictor
    scoring: Score  # of answers in the course of training
    checkpoints: Checkpoints
    state: TrainState
    progress: Progress
    notes: list[str]  # what was chosen, and where the state is from: damaged checkpoints passed over, another run
    saved_step: int  # the newest update that has a checkpoint; 0 is the beginning, which has none

    @property
    def finished(self) -> bool:
        """Whether all updates are done, or patience or the time is over."""
        train, progress = self.config.train, self.progress
        timed_out = 0 < 60 * train.max_minutes <= progress.seconds
        return progress.step >= train.num_steps or 0 < train.patience <= progress.since_best or timed_out


def build(config: Config, workdir: Path) -> Run:
    """Open, check and build everything; a workdir that holds a run gives that run, at its newest checkpoint."""
    checkpoints = open_checkpoints(config, workdir)
    try:
        return build_on(checkpoints, config, workdir)
    except BaseException:
        checkpoints.close()  # nobody else can: the run that would hold them was not made
        raise


def build_on(checkpoints: Checkpoints, config: Config, workdir: Path) -> Run:
    """Return the run that goes on from these checkpoints, or begins."""
    saved = saved_config(workdir, checkpoints)
    if checkpoints.steps() == [0]:  # import, prune and extend write that: parameters without an optimizer's state
        raise UserError(
            f"{workdir} holds parameters that no run trained: begin with them in a --workdir of its own, with "
            f"--config.train.init_from={workdir}"
        )
    if saved:
        config = resume_config(saved, config)
    mesh = open_mesh(config)
    config, chosen = choose_dtype(config, "model", mesh)
    config = checks.divide_rows(config, row_shards(mesh))
    task = build_task(config)
    with processes.main_process_first():  # process 0 makes what the others then find
        data = open_data(config, task, workdir, bool(saved) or not processes.is_main_process())
    processes.check_same(fingerprints(data))
    config = checks.count_epochs(config, len(data.batches))
    refuse_later_mistakes(config, task, data)
    model = build_sized(config, task, data.tokenizers)
    optimizer = build_optimizer(config, model)
    make = functools.partial(create_state, tx=optimizer.transform, ema=bool(config.train.ema_decay))
    with show_progress("loading the parameters", quiet=not processes.is_main_process()):
        state, progress, notes = open_state(config, mesh, model, data.tokenizers, make, checkpoints)
    refuse_other_text(data, progress, workdir)
    progress.config = dataclasses.asdict(config)
    progress.tokenizers = [tokenizer.fingerprint for tokenizer in data.tokenizers]
    loss = make_loss(model, task, config.optim.r_drop)
    tx, passes = optimizer.transform, config.optim.passes
    trained = Trained(config=config, task=task, tokenizers=data.tokenizers, model=model, params=state.params)
    return Run(
        config=config,
        mesh=mesh,
        data=data,
        schedule=optimizer.schedule,
        train_step=make_train_step(loss, tx, mesh, config.seed, config.train.ema_decay, optimizer.frozen),
        examination=Examination(model, trained_loss(loss, optimizer.frozen), tx, mesh, config.seed, passes),
        eval_step=make_eval_step(loss, mesh),
        sampler=greedy_predictor(trained, min(max(1, len(data.answered)), config.decode.batch_size), mesh),
        scoring=build_task(scored_during(config)).score,
        checkpoints=checkpoints,
        state=state,
        progress=progress,
        notes=[*chosen, *notes],
        saved_step=progress.step,
    )


def scored_during(config: Config) -> Config:
    """Return the config with the scores that are asked for in the course of training instead of those of the end."""
    names = tuple(name for name in config.evaluate.during if name in TEXT_SCORES)
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, scores=names))


def open_checkpoints(config: Config, workdir: Path) -> Checkpoints:
    """Open the checkpoints of a run, to keep as many as it asks for, and as many as it will average."""
    averaged = config.evaluate.average_last if config.evaluate.weights == "average" else 1
    keep = max(config.train.keep_last, averaged)
    return Checkpoints(workdir / "checkpoints", config.train.checkpoint_every, keep)


def greedy_predictor(run: Trained, batch_size: int, mesh: Mesh) -> Predictor:
    """Return a Predictor that answers with one beam, so many texts in a batch, as for the samples of training."""
    decode = dataclasses.replace(
        run.config.decode,
        search="beam",
        beam_size=1,
        beam_groups=1,
        n_best=1,
        alignments=False,
        batch_size=batch_size,
    )
    config = dataclasses.replace(run.config, decode=decode)
    return Predictor(dataclasses.replace(run, config=config), mesh=mesh, prepare=False)


def saved_config(workdir: Path, checkpoints: Checkpoints) -> Config | None:
    """Return the config of the run in a workdir, or None for a new one.

    Should config.json be lost, the checkpoints know it: they must not go on under another one.
    """
    if (workdir / "config.json").exists():
        return load_config(workdir / "config.json")
    return resolve(checkpoints.newest_progress()["config"]) if checkpoints.steps() else None


def refuse_later_mistakes(config: Config, task: Task, data: Data) -> None:
    """Raise UserError for what would be found out when the trained run is scored."""
    for other in config.decode.ensemble:
        member_config(other, config, data.tokenizers)
    if task.answer == "tags":
        refuse_scores_of_spans(config.evaluate.during, data.tokenizers[1])
    if task.answer in CLASSES:
        for key, name in config.data.test_splits().items():
            refuse_unknown_labels(key, open_split(config.data, name), data.tokenizers[1])
    if task.answer in ("text", "continuation"):
        writable(data.tokenizers[1], config.decode)  # which refuses a beam, and words, that scoring would refuse


def refuse_unknown_labels(key: str, test: Split, labels: Tokenizer) -> None:
    """Raise UserError for a label of a test set that training does not hold."""
    found = {pair.target: None for pair in test.read(Counter())}
    try:
        labels.encode(list(found))
    except UserError as error:
        raise UserError(f"data.test: the set {key!r}: {error}") from error


def refuse_other_text(data: Data, progress: Progress, workdir: Path) -> None:
    """Note the text of a run in its progress, or raise UserError where an earlier start had another."""
    texts = [corpus.fingerprint for corpus in data.texts.values()]
    trained, valid = texts[: len(data.corpora)], texts[len(data.corpora) :]
    for what, before, now in (("training", progress.data, trained), ("validation", progress.valid, valid)):
        if before and now and before != now:
            raise UserError(
                f"{workdir}: its {what} text or tokenizer has changed since update {progress.step}: restore it"
            )
    progress.data, progress.valid = trained, valid or progress.valid
