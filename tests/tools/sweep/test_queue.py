import contextlib
import json
import math
import sqlite3
import subprocess
import sys
import time

import pytest
from optuna.trial import TrialState

from jformer.errors import UnavailableError, UserError
from jformer.tools.sweep.queue import _started, is_dead, this_process
from jformer.tools.sweep.store import FileLock
from tests.tools.sweep.sweeps import SEARCH, SWEEP, close, journal, open_queue, rows

STORAGES = {"journal": "", "sqlite": "sqlite:///{}/trials.db"}
ONE = SWEEP.replace("2.0, 3.0", "")
GONE = {"host": "here", "pid": 1, "started": "never"}


@pytest.fixture(autouse=True)
def closed():
    yield
    close()


@pytest.fixture(params=STORAGES)
def storage(request, tmp_path):
    return STORAGES[request.param].format(tmp_path)


@pytest.fixture
def queue(tmp_path):
    queue = open_queue(tmp_path)
    queue.plan()
    return queue


def another(tmp_path, storage="", **options):
    """Return the queue as another worker sees it."""
    return open_queue(tmp_path, storage=storage, **options)


def states(queue):
    return [trial.state for trial in queue.trials()]


def test_a_plan_has_a_row_for_each_arm_and_seed(queue):
    assert len(rows(queue)) == 6
    queue.plan()
    assert len(rows(queue)) == 6
    assert [(trial.arm, trial.seed) for trial in queue.trials()][:4] == [
        ("learning_rate=1", 0),
        ("learning_rate=2", 0),
        ("learning_rate=3", 0),
        ("learning_rate=1", 1),
    ]


def test_a_trial_has_one_owner(tmp_path, storage):
    queue = another(tmp_path, storage)
    other = another(tmp_path, storage)
    claims = [one.claim() for _ in range(3) for one in (queue, other)]
    assert len({claim.trial.name for claim in claims}) == 6
    assert queue.claim() is None
    assert states(other) == ["running"] * 6
    assert queue.left() == 6


def test_of_two_that_take_a_trial_at_once_one_gets_it(tmp_path, storage, monkeypatch):
    queue, other = open_queue(tmp_path, storage=storage), another(tmp_path, storage)
    queue.plan()
    take, claims = queue.study._storage.set_trial_state_values, []

    def overtaken(*args, **options):
        if not claims:
            claims.append(other.claim())
        return take(*args, **options)

    monkeypatch.setattr(queue.study._storage, "set_trial_state_values", overtaken)
    mine = queue.claim()
    assert mine.trial.name != claims[0].trial.name
    assert mine.renew(1.0)
    assert claims[0].renew(1.0)


def test_a_result_is_recorded_once(tmp_path, storage):
    queue = another(tmp_path, storage)
    claim = queue.claim()
    assert claim.renew(1.0)
    assert claim.complete(0.5, {"valid/loss": 0.5}, 2.0)
    assert not claim.complete(0.7, {"valid/loss": 0.7}, 3.0)
    assert not claim.fail("late", 3.0)
    trial = another(tmp_path, storage).trials()[0]
    assert (trial.state, trial.value, trial.metrics, trial.seconds) == ("complete", 0.5, {"valid/loss": 0.5}, 2.0)
    assert (trial.attempts, trial.error) == (1, "")
    assert queue.left() == 5


def test_a_failure_is_kept_with_its_error_until_it_is_tried_again(tmp_path, storage):
    queue = another(tmp_path, storage)
    claim = queue.claim()
    claim.fail("out of memory", 1.0)
    other = another(tmp_path, storage)
    other.plan()
    assert (other.trials()[0].state, other.trials()[0].error) == ("failed", "out of memory")
    other.plan(retry_failed=True)
    other.plan(retry_failed=True)
    assert other.trials()[0].state == "waiting"
    assert [other.claim().trial.name for _ in range(6)][-1] == claim.trial.name  # after the others
    assert other.trials()[0].error == ""


def test_a_trial_given_back_is_resumed_by_another(tmp_path):
    queue = open_queue(tmp_path, ONE, SEEDS=(0,))
    first = queue.claim()
    first.give_back(2.0)
    second = queue.claim()
    assert second.trial.name == first.trial.name
    assert not first.complete(1.0, {}, 3.0)
    assert second.complete(2.0, {}, 5.0)
    trial = queue.trials()[0]
    assert (trial.value, trial.seconds, trial.attempts) == (2.0, 7.0, 2)


def test_crashes_are_counted_anew_when_a_failed_trial_is_tried_again(tmp_path):
    queue = open_queue(tmp_path, ONE, SEEDS=(0,))
    for crashes in range(2):
        claim = queue.claim()
        assert claim.crashes == crashes
        claim.give_back(1.0, crash="killed")
    queue.claim().fail("killed", 1.0)
    queue.plan(retry_failed=True)
    assert queue.claim().crashes == 0


def test_an_owner_silent_for_a_lease_loses_its_trial(tmp_path, monkeypatch):
    now = [0.0]
    queue, other = open_queue(tmp_path, lease=10), another(tmp_path, lease=10)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    held = queue.claim()
    taken = [other.claim() for _ in range(5)]
    for _ in range(4):
        now[0] += 9
        assert all(claim.renew(now[0]) for claim in [held, *taken])
        assert other.claim() is None
    now[0] += 9
    assert all(claim.renew(now[0]) for claim in taken)
    assert other.claim() is None
    now[0] += 2
    claim = other.claim()
    assert claim.trial.name == held.trial.name
    assert not held.renew(now[0])
    assert not held.complete(1.0, {}, 1.0)
    assert claim.complete(2.0, {}, 1.0)
    assert other.trials()[0].value == 2.0


def test_a_worker_suspended_while_reading_takes_nothing_from_others(tmp_path, monkeypatch):
    queue, other = open_queue(tmp_path, lease=10), another(tmp_path, lease=10)
    now, read = [0.0], other.study.get_trials
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def stopped(*args, **options):
        found = read(*args, **options)
        now[0] += 60
        assert held.renew(now[0])
        return found

    held = queue.claim()
    other._take_back()
    monkeypatch.setattr(other.study, "get_trials", stopped)
    other._take_back()
    assert held.renew(0.0)


def test_a_dead_owner_of_this_machine_is_not_waited_for(queue, monkeypatch):
    claim = queue.claim()
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    alive = {**this_process(), "pid": process.pid, "started": _started(process.pid)}
    claim._set(owner=alive)
    assert not is_dead(alive)
    assert not is_dead({**GONE, "machine": "another"})
    assert is_dead({**GONE, "machine": this_process()["machine"]})  # the number is another process's now
    process.communicate()
    assert is_dead(alive)
    assert {queue.claim().trial.name for _ in range(6)} >= {claim.trial.name}


def test_of_two_rows_of_a_trial_only_the_first_counts(tmp_path, queue):
    other = another(tmp_path)
    trial = queue.trials()[0]
    other._add(trial, [], after=-1)
    names = [queue.claim().trial.name for _ in range(6)]
    assert names.count(trial.name) == 1
    assert queue.claim() is None
    assert len(rows(queue)) == 7


def test_a_removed_arm_is_not_run(tmp_path, queue):
    fewer = another(tmp_path, code=SWEEP.replace(", 3.0", ""))
    names = {fewer.claim().trial.arm for _ in range(4)}
    assert names == {"learning_rate=1", "learning_rate=2"}
    assert fewer.claim() is None
    assert len(fewer.trials()) == 4


def test_arms_may_be_added_and_are_listed_in_their_order(tmp_path, queue):
    queue.claim().complete(1.0, {}, 1.0)
    more = another(tmp_path, code=SWEEP.replace("[1.0", "[0.5, 1.0"))
    assert states(more) == ["waiting", "complete", *["waiting"] * 6]
    assert [more.claim().trial.arm for _ in range(7)].count("learning_rate=0.5") == 2


def test_a_figure_that_is_no_number_leaves_the_journal_readable(tmp_path):
    options = {"SEEDS": (0,), "TRIALS": 2, "SAMPLER": "random", "PRUNER": "median", "code": SEARCH}
    claim = open_queue(tmp_path, **options).claim()
    assert not claim.should_prune({1: math.nan})
    claim.complete(0.5, {"train/mfu": math.nan, "valid/perplexity": math.inf}, 1.0)
    (trial,) = another(tmp_path, **options).trials()
    assert (trial.value, math.isnan(trial.metrics["train/mfu"])) == (0.5, True)


def test_overrides_are_what_the_file_sets(tmp_path):
    queue = open_queue(tmp_path, '\ndef sweep():\n    return [{"evaluate.scores": ("bleu",)}]\n')
    queue.plan()
    assert queue.trials()[0].overrides == {"evaluate.scores": ("bleu",)}


def test_a_second_experiment_in_a_workdir_is_refused(tmp_path):
    open_queue(tmp_path)
    with pytest.raises(UserError, match="its metric is 'valid/loss', not 'valid/nll': use another --workdir"):
        open_queue(tmp_path, METRIC="valid/nll")
    with pytest.raises(UserError, match="its goal is 'min', not 'max': use another --workdir"):
        open_queue(tmp_path, GOAL="max")
    with pytest.raises(UserError, match=r"sweep: has a sweep already, and trials.journal has no study 'other': check"):
        open_queue(tmp_path, name="other")


@pytest.mark.parametrize("made", STORAGES)
@pytest.mark.parametrize(("given", "says"), [
    ("sqlite:///{}/typo.db", "typo.db is not there"), ("sqlite:///{}/other.db", "other.db has no study 'small'"),
    ("", "trials.journal is not there"),
])  # fmt: skip
def test_a_sweep_is_never_begun_again_in_a_mistyped_storage(tmp_path, made, given, says):
    (tmp_path / "other").mkdir()
    open_queue(tmp_path / "other", storage=f"sqlite:///{tmp_path}/other.db", name="another")
    open_queue(tmp_path, storage=STORAGES[made].format(tmp_path)).plan()
    close()
    if made == "journal" and not given:
        (tmp_path / "sweep" / "trials.journal").unlink()
    before = {*tmp_path.rglob("*")}
    with pytest.raises(UserError, match=f"has a sweep already, and .*{says}: check --storage and --study"):
        open_queue(tmp_path, storage=given.format(tmp_path))
    assert {*tmp_path.rglob("*")} == before


def test_a_sweep_whose_first_process_died_while_opening_it_is_opened(tmp_path):
    open_queue(tmp_path)
    record = tmp_path / "sweep" / "sweep.json"
    here = json.loads(record.read_text())
    record.write_text(json.dumps({**here, "opening": "yes"}))
    for gone in ((), ("trials.journal",)):  # it died after the study had its mark, or before
        for name in gone:
            (tmp_path / "sweep" / name).unlink()
        open_queue(tmp_path).plan()
        assert json.loads(record.read_text()) == here
        record.write_text(json.dumps({**here, "opening": "yes"}))


def test_a_changed_base_is_refused_naming_the_key(tmp_path):
    open_queue(tmp_path)
    with pytest.raises(UserError, match=r"^train.num_steps=50 but the trials of this sweep have 40: set it back"):
        open_queue(tmp_path, FIXED={"train.num_steps": 50})
    open_queue(tmp_path, keys=["data.dir=elsewhere"])
    (tmp_path / "epochs").mkdir()
    open_queue(tmp_path / "epochs", FIXED={"train.num_epochs": 1.0})
    with pytest.raises(UserError, match=r"^train.num_steps=50 but the trials of this sweep have 40: set it back"):
        open_queue(tmp_path / "epochs", FIXED={"train.num_epochs": 1.0, "train.num_steps": 50})


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_search_makes_the_planned_number_of_trials_whoever_asks(tmp_path, storage, sampler):
    options = {"SEEDS": (0,), "TRIALS": 7, "SAMPLER": sampler, "code": SEARCH}
    queues = [another(tmp_path, storage, **options) for _ in range(2)]
    values = []
    while queues[0].left():
        for claim in [queue.claim() for queue in queues]:
            if claim:
                values.append(claim.trial.overrides["optim.learning_rate"])
                claim.complete(values[-1], {}, 1.0)
    assert [trial.value for trial in queues[0].trials()] == values
    assert len(set(values)) == 7
    assert len(rows(queues[0])) == 7
    assert all(queue.claim() is None for queue in queues)


def test_those_that_ask_for_the_last_trial_at_once_get_it_once(tmp_path, monkeypatch):
    options = {"SEEDS": (0,), "TRIALS": 1, "SAMPLER": "random", "code": SEARCH}
    queue, other = (another(tmp_path, **options) for _ in range(2))
    create, claims = queue.study._storage.create_new_trial, []

    def overtaken(*args):
        claims.append(other.claim())
        return create(*args)

    monkeypatch.setattr(queue.study._storage, "create_new_trial", overtaken)
    assert queue.claim() is None
    assert claims[0].complete(1.0, {}, 1.0)
    assert (queue.left(), len(queue.trials())) == (0, 1)


def test_a_suggestion_in_progress_is_waited_for_without_new_rows(tmp_path):
    options = {"SEEDS": (0,), "TRIALS": 1, "SAMPLER": "random", "code": SEARCH}
    queue, other = (another(tmp_path, **options) for _ in range(2))
    queue._suggest = lambda row: pytest.fail("killed") if other.claim() else sys.exit("killed")
    with pytest.raises(SystemExit):
        queue.claim()
    assert [other.claim() for _ in range(5)] == [None] * 5
    assert len(rows(other)) == 1
    queue.end(rows(other)[0].number, TrialState.FAIL)
    assert other.claim().complete(1.0, {}, 1.0)
    assert len(other.trials()) == 1


def test_a_trial_of_a_search_is_resumed_with_its_own_suggestions(tmp_path):
    options = {"SEEDS": (0,), "TRIALS": 2, "SAMPLER": "tpe", "code": SEARCH}
    queue, other = (another(tmp_path, **options) for _ in range(2))
    first = queue.claim()
    assert first.crashes == 0
    first.give_back(1.0)
    other._add(first.trial, rows(other)[:1], after=-1)
    other._add(first.trial, rows(other)[:1], after=-1)  # of one that planned at the same moment
    again, second = queue.claim(), queue.claim()
    assert again.trial.overrides == first.trial.overrides
    assert rows(queue)[1].params == rows(queue)[0].params == {"lr": first.trial.overrides["optim.learning_rate"]}
    assert second.trial.name != first.trial.name
    assert second.trial.overrides != first.trial.overrides
    assert [trial.name for trial in other.trials()] == [first.trial.name, second.trial.name]


def test_a_trial_has_the_label_that_its_arm_has_now(tmp_path):
    one, two = (SWEEP.replace("1.0, 2.0, 3.0", values) for values in ("1.0", "1.0, 2.0"))
    queue = open_queue(tmp_path, one)
    while claim := queue.claim():
        claim.complete(0.5, {}, 1.0)
    assert {trial.arm for trial in queue.trials()} == {"base"}
    trials = open_queue(tmp_path, two).trials()
    assert [(trial.arm, trial.state) for trial in trials] == [
        ("learning_rate=1", "complete"), ("learning_rate=2", "waiting"),
    ] * 2  # fmt: skip


def test_a_later_suggestion_that_cannot_work_is_a_failed_trial(tmp_path):
    code = SEARCH.replace('trial.suggest_float("lr", 1.0, 2.0)', "(-1.0 if trial.number == 1 else 1.0)")
    queue = open_queue(tmp_path, code, SEEDS=(0,), TRIALS=3, SAMPLER="random")
    while queue.left():
        if claim := queue.claim():
            claim.complete(0.5, {}, 1.0)
    assert states(queue) == ["complete", "failed", "complete"]
    assert "optim.learning_rate=-1.0" in queue.trials()[1].error


def test_a_suggestion_that_reports_no_metric_is_a_failed_trial(tmp_path):
    code = SEARCH.replace('{"optim', '{"train.ema_decay": 0.9 * (trial.number != 1), "optim')
    queue = open_queue(tmp_path, code, SEEDS=(0,), TRIALS=3, SAMPLER="random", METRIC="valid_ema/loss",
                       FIXED={"train.ema_decay": 0.9})  # fmt: skip
    while queue.left():
        if claim := queue.claim():
            claim.complete(0.5, {}, 1.0)
    assert states(queue) == ["complete", "failed", "complete"]
    assert "METRIC='valid_ema/loss'" in queue.trials()[1].error


@pytest.mark.parametrize(("key", "says"), [
    ("seed", "seed=1.5, but seeds are"), ("optim.learning_rate", "but --config.optim.learning_rate is for all"),
])  # fmt: skip
def test_a_search_that_sets_what_is_set_for_all_is_refused(tmp_path, key, says):
    code = SEARCH.replace("optim.learning_rate", key).replace('trial.suggest_float("lr", 1.0, 2.0)', "1.5")
    queue = open_queue(tmp_path, code, SEEDS=(0,), TRIALS=2, keys=["optim.learning_rate=0.5"])
    with pytest.raises(UserError, match=says):
        queue.claim()


def test_a_suggestion_is_the_first_only_if_no_other_worker_suggests(tmp_path):
    code = SEARCH.replace('trial.suggest_float("lr", 1.0, 2.0)', "-1.0")
    queue, other = (open_queue(tmp_path, code, SEEDS=(0,), TRIALS=3, SAMPLER="random") for _ in range(2))
    row = other.study.ask()  # its search() has not returned yet
    assert queue.claim() is None
    assert states(queue) == ["failed"]
    other.end(row.number, TrialState.FAIL)


def test_a_worker_that_lost_its_row_in_search_goes_on(tmp_path):
    queue = open_queue(tmp_path, SEARCH, SEEDS=(0,), TRIALS=2, SAMPLER="random")
    search = queue.experiment.search

    def late(trial):
        queue.end(trial.number, TrialState.FAIL)
        return search(trial)

    object.__setattr__(queue.experiment, "search", late)
    assert queue.claim() is None
    object.__setattr__(queue.experiment, "search", search)
    assert queue.claim()


def test_a_search_with_a_mistake_in_python_is_one_line(tmp_path):
    queue = open_queue(tmp_path, SEARCH.replace("suggest_float", "suggest_flot"), SEEDS=(0,), TRIALS=2)
    with pytest.raises(
        UserError, match=r"small\.py: search\(\) of trial 0: AttributeError: 'Trial' object has no attr"
    ):
        queue.claim()


def test_a_search_that_sets_an_unknown_key_names_the_nearest(tmp_path):
    queue = open_queue(tmp_path, SEARCH.replace("_rate", "_rat"), SEEDS=(0,), TRIALS=2)
    with pytest.raises(UserError, match=r"search\(\) of trial 0: unknown config key .*_rat; did you mean .*_rate"):
        queue.claim()


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_a_trial_far_behind_others_should_be_pruned(tmp_path, pruner):
    queue = open_queue(tmp_path, SEARCH, SEEDS=(0,), TRIALS=12, SAMPLER="random", PRUNER=pruner)
    for _ in range(10):
        claim = queue.claim()
        claim.should_prune({20: 1.0})
        claim.should_prune({20: 1.0, 40: 0.5})
        claim.complete(0.5, {}, 1.0)
    good, bad = queue.claim(), queue.claim()
    assert not bad.should_prune({})
    assert not good.should_prune({20: 0.1})
    assert bad.should_prune({20: 100.0})
    bad.prune({"valid/loss": 100.0}, 1.0)
    assert not bad.should_prune({20: 100.0, 40: 100.0})  # it is ours no more
    assert (queue.trials()[-1].state, queue.trials()[-1].value) == ("pruned", 100.0)


@pytest.mark.parametrize(("metric", "every"), [("train/loss", 5), ("valid/loss", 20), ("valid_ema/loss", 20)])
def test_no_trial_is_pruned_before_its_metric_is_reported(tmp_path, metric, every):
    options = {"SEEDS": (0,), "TRIALS": 2, "PRUNER": "hyperband", "FIXED": {"train.ema_decay": 0.9}}
    assert open_queue(tmp_path, SEARCH, METRIC=metric, **options).study.pruner._min_resource == every


def test_a_storage_unreachable_for_a_moment_changes_nothing(tmp_path, monkeypatch):
    queue = open_queue(tmp_path, lease=10)
    monkeypatch.setattr("jformer.tools.sweep.queue.PAUSE", 0.0)
    claim = queue.claim()
    write, faults = queue.study._storage.set_trial_state_values, [OSError("No space left on device")] * 2

    def away(*args, **options):
        if faults:
            raise faults.pop()
        return write(*args, **options)

    monkeypatch.setattr(queue.study._storage, "set_trial_state_values", away)
    assert claim.complete(1.0, {}, 1.0)
    assert queue.trials()[0].state == "complete"
    queue.lease = -1
    faults.append(OSError("No space left on device"))
    with pytest.raises(UserError, match=r"the trials cannot be reached \(No space left on device\); check that"):
        queue.claim()
    faults.append(ConnectionRefusedError("connection refused"))
    with pytest.raises(UnavailableError, match=r"cannot be reached \(connection refused\); rerun the same command"):
        queue.claim()


def test_sqlite_locks_the_rows_that_it_reads_to_change(tmp_path):
    queue = open_queue(tmp_path, storage=f"sqlite:///{tmp_path}/trials.db")
    with (
        queue.study._storage._backend.engine.begin() as connection,
        contextlib.closing(sqlite3.connect(tmp_path / "trials.db", timeout=0)) as other,
    ):
        connection.exec_driver_sql("SELECT state FROM trials")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")


def test_an_incomplete_line_is_cut_off(tmp_path):
    queue = open_queue(tmp_path)
    queue.plan()
    before = journal(tmp_path)
    path = tmp_path / "sweep" / "trials.journal"
    with path.open("a") as file:
        file.write('{"op_code":8,"worker_id":"gone","tri')
    assert states(queue) == ["waiting"] * 6
    assert queue.claim().complete(1.0, {}, 1.0)
    assert journal(tmp_path)[: len(before)] == before
    assert states(another(tmp_path)) == ["complete", *["waiting"] * 5]


def test_a_journal_that_stays_locked_is_a_one_line_error(tmp_path, monkeypatch):
    queue = open_queue(tmp_path)
    monkeypatch.setattr("jformer.tools.sweep.store.PATIENCE", 0.05)
    lock = FileLock(tmp_path / "sweep" / "trials.journal")
    lock.acquire()
    with pytest.raises(UserError, match=r"journal: locked by another process for 0 seconds; is a worker stopped"):
        queue.plan()
    lock.release()
    queue.plan()


def test_stale_locks_of_optuna_are_ignored(tmp_path):
    queue = open_queue(tmp_path)
    (tmp_path / "sweep" / "trials.journal.lock").touch()
    began = time.monotonic()
    queue.plan()
    assert len(rows(queue)) == 6
    assert time.monotonic() - began < 20  # Optuna waits for 30 seconds


def test_an_invalid_journal_is_a_one_line_error(tmp_path):
    queue = open_queue(tmp_path)
    path = tmp_path / "sweep" / "trials.journal"
    path.write_text("garbage\n" + path.read_text())
    with pytest.raises(UserError, match=r"trials.journal:1 is not a row of a trial journal \(Expecting value"):
        another(tmp_path)
    queue.trials()  # reads on from where it was


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("postgresql+psycopg://me:secret@127.0.0.1:1/sweeps", "needs a driver|Connection refused|connection"),
        ("nosuch://somewhere/db", "Can't load plugin: sqlalchemy.dialects:nosuch"),
        ("sqlite:////no/such/folder/trials.db", "unable to open database file"),
        ("trials.db", "must be an SQLAlchemy URL, such as postgresql://"),
    ],
)
def test_an_unreachable_storage_is_a_one_line_error(tmp_path, storage, said):
    with pytest.raises(UserError, match=said) as caught:
        open_queue(tmp_path, storage=storage)
    assert "secret" not in str(caught.value)


def test_a_new_workdir_does_not_adopt_the_trials_of_another(tmp_path, monkeypatch):
    first = open_queue(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("jformer.tools.sweep.store.open_storage", lambda *_: first.study._storage)  # as one database is
    with pytest.raises(UserError, match=r"elsewhere/sweep: is new, and does not belong to study 'small' of"):
        open_queue(tmp_path / "elsewhere")


def test_a_trial_lost_with_its_worker_comes_after_the_others(queue, tmp_path):
    lost = queue.claim()
    queue.end(lost._row.number, TrialState.FAIL)
    following = [queue.claim().trial.name for _ in range(6)]
    assert following[-1] == lost.trial.name
    assert len(set(following)) == 6


def test_an_owner_may_be_silent_for_its_own_lease(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    patient, hasty = open_queue(tmp_path, lease=600.0), open_queue(tmp_path, lease=60.0)
    monkeypatch.setattr("jformer.tools.sweep.queue.is_dead", lambda owner: False)
    own = patient.claim()
    hasty._take_back()
    now[0] = 599.0
    hasty._take_back()
    assert own.renew(1.0)
    hasty._take_back()
    now[0] = 1201.0
    hasty._take_back()
    assert not own.renew(1.0)


@pytest.mark.parametrize("code", [
    "def sweep(): return [{'model.d_ff': n, 'data.cache_dir': Path('/tmp')} for n in np.array([64, 128])]",
    "def search(trial): return {'model.d_ff': np.int64(64), 'data.cache_dir': Path('/tmp')}",
])  # fmt: skip
def test_overrides_may_be_scalars_of_numpy_and_paths(tmp_path, code):
    more = {"SEEDS": (0,), "TRIALS": 2} if "search" in code else {}
    queue = open_queue(tmp_path, f"\nfrom pathlib import Path\nimport numpy as np\n{code}\n", **more)
    queue.plan()
    assert queue.claim().trial.overrides == {"model.d_ff": 64, "data.cache_dir": "/tmp"}
