"""A wheel alone, without the repository, has what a user needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK = ["--config.train.num_steps=2", "--config.optim.warmup=1", "--config.data.num_pairs=500"]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_trains_the_quickstart_and_has_every_file_of_the_package(tmp_path):
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone")
    run(*pip, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", tmp_path / "clone")
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", f"--target={tmp_path / 'site'}", wheel)
    command = (sys.executable, "-m", "jformer.main")
    environment = {"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"}
    where = run(sys.executable, "-c", "import jformer; print(jformer.__file__)", cwd=tmp_path, env=environment)
    assert where.startswith(str(tmp_path / "site"))
    run(*command, "--config=quickstart", "--workdir=run", *QUICK, cwd=tmp_path, env=environment)
    assert (tmp_path / "run" / "report.html").is_file()

    packed = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site" / "jformer").rglob("*")}
    tracked = run("git", "ls-files", "jformer", "configs", cwd=ROOT).split()
    expected = {Path(name.replace("configs/", "jformer/recipes/")) for name in tracked if name != "jformer/recipes"}
    assert not expected - packed
