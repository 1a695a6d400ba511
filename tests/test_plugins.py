"""User-defined parts: what may be imported, what a run records of them, and what is reported."""

import importlib
import json
import sys
import types
from pathlib import Path

import jax
import pytest
from etils import epath
from flax import linen as nn

from jformer import plugins
from jformer.config import default_config, load_config, resolve, save_config
from jformer.config.config_files import override, run_config_file
from jformer.errors import UserError
from jformer.main import main
from jformer.models import FeedForward, ModelConfig, build_model, init_params
from jformer.tasks.build import build_task

TABLE = {"sqrt": "math:sqrt", "twice": lambda x: 2 * x}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module that may not be imported yet, in which `part` is a function; return its name."""
    monkeypatch.setattr(plugins, "_allowed", set())
    monkeypatch.setattr(plugins, "_recorded", {})
    monkeypatch.setattr(plugins, "_found", {})
    monkeypatch.delenv("JFORMER_PARTS")
    monkeypatch.syspath_prepend(tmp_path)
    name = f"mine_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("def part(config, split):\n    return split\n\nvalue = 1\n")
    yield name
    sys.modules.pop(name, None)


def test_built_in_parts_are_found_by_name_and_imported_on_first_use():
    assert plugins.find("a.b", "sqrt", TABLE)(9) == 3
    assert plugins.find("a.b", "twice", TABLE)(9) == 18


def test_an_unknown_name_is_answered_with_all_that_could_stand_there(mine):
    with pytest.raises(UserError) as error:
        plugins.find("a.b", "sqtr", TABLE)
    assert str(error.value) == (
        "a.b='sqtr'; choose one of: sqrt, twice, or name package.module:function (did you mean 'sqrt'?)"
    )


def test_a_module_is_not_imported_unless_it_was_allowed(mine, monkeypatch):
    with pytest.raises(UserError) as error:
        plugins.find("data.source", f"{mine}:part", TABLE)
    assert f"data.source='{mine}:part'" in str(error.value)
    assert f"set JFORMER_PARTS={mine}" in str(error.value)
    assert f"jformer.plugins.allow('{mine}')" in str(error.value)
    plugins.allow("other", f"{mine}.inner", mine[:-1])
    with pytest.raises(UserError, match="JFORMER_PARTS"):
        plugins.find("data.source", f"{mine}:part", TABLE)
    assert mine not in sys.modules
    monkeypatch.setenv("JFORMER_PARTS", f"other, {mine}")
    assert plugins.find("data.source", f"{mine}:part", TABLE)(None, "x") == "x"


def test_a_package_allows_its_modules():
    plugins.allow("tests")
    assert plugins.find("a", "tests.test_plugins:mine", {}) is sys.modules[__name__].mine


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("{}:parts", "has no function parts; did you mean part?"),
        ("{}:value", "has no function value; "),
        ("{}.none:x", "cannot import "),
    ],
)
def test_what_is_not_there_is_named(mine, place, message):
    plugins.allow(mine)
    with pytest.raises(UserError) as error:
        plugins.find("a.b", place.format(mine), {})
    assert str(error.value).startswith(f"a.b='{place.format(mine)}': ")
    assert message in str(error.value)


def test_a_part_takes_the_arguments_of_its_kind(mine):
    plugins.allow(mine, "math", "operator")
    with pytest.raises(
        UserError, match=r"^optim.optimizer='.*:part' takes \(config, split\), and is called with 3 arg"
    ):
        plugins.find("optim.optimizer", f"{mine}:part", {})
    plugins.find("data.source", f"{mine}:part", {})
    plugins.find("evaluate.scores", "operator:add", {})  # written in C
    plugins.find("evaluate.scores", "math:hypot", {})  # without a signature


def config_of(mine):
    values = default_config()
    values.data.source = f"{mine}:part"
    return values


def test_a_part_of_a_notebook_has_no_digest(mine, monkeypatch):
    plugins.allow(mine)
    monkeypatch.setitem(sys.modules, mine, module := types.ModuleType(mine))
    module.part = len
    assert plugins.digests([f"{mine}:part"]) == {f"{mine}:part": ""}


def test_a_saved_config_has_the_digest_of_a_part_and_reading_it_imports_nothing(mine, tmp_path, capsys):
    path = epath.Path(tmp_path) / "config.json"
    config = resolve(config_of(mine))
    with pytest.raises(UserError, match="JFORMER_PARTS"):
        save_config(config, path)
    plugins.allow(mine)
    save_config(config, path)
    assert list(json.loads(path.read_text())["parts"]) == [f"{mine}:part"]
    del sys.modules[mine]
    plugins._allowed.clear()
    assert load_config(path) == config
    assert mine not in sys.modules
    plugins.allow(mine)
    plugins.find("data.source", f"{mine}:part", {})
    assert capsys.readouterr().err == ""


def test_a_part_whose_source_has_changed_is_reported_once(mine, tmp_path, capsys):
    plugins.allow(mine)
    save_config(resolve(config_of(mine)), epath.Path(tmp_path) / "config.json")
    with (tmp_path / f"{mine}.py").open("a") as file:
        file.write("# another\n")
    del sys.modules[mine]  # as in another process
    load_config(epath.Path(tmp_path) / "config.json")
    for _ in range(2):
        plugins.find("data.source", f"{mine}:part", {})
    err = capsys.readouterr().err
    assert err.startswith(f"{mine}:part has changed since the run recorded it: SHA-256 ")
    assert err.count("\n") == 1


def test_answers_do_not_import_the_loss(mine):
    values = default_config()
    values.optim.loss = f"{mine}:part"
    assert build_task(resolve(values)).answer == "text"
    assert mine not in sys.modules


def test_scores_record_the_parts_whose_modules_are_imported(mine):
    plugins.allow(mine)
    plugins.find("data.source", f"{mine}:part", {})
    own = plugins.digests([f"{mine}:part"])
    assert plugins.digests_of_imported([f"{mine}:part", f"{mine}.other:part"]) == own


def test_a_damaged_record_of_parts_is_refused(tmp_path, mine):
    path = epath.Path(tmp_path) / "config.json"
    for wrong in ([1], {"a:b": 1}):
        path.write_text(json.dumps({"parts": wrong}))
        with pytest.raises(UserError, match="is not a record of parts"):
            load_config(path)


def test_a_command_allows_what_its_arguments_and_its_config_file_name(mine, tmp_path):
    values = override(config_of(mine), ["--config.seed=1"])
    with pytest.raises(UserError, match="JFORMER_PARTS"):
        plugins.find("data.source", values.data.source, {})
    override(default_config(), [f"--config.data.source={mine}:part"])
    assert plugins.find("data.source", values.data.source, {})
    plugins._allowed.clear()
    (tmp_path / "own.py").write_text(
        "from jformer.config import default_config\n\n\ndef get_config():\n    config = default_config()\n"
        f"    config.evaluate.scores = ('bleu', '{mine}:part')\n    config.data.mixture = ({{'source': 'a.b:c'}},)\n"
        "    config.evaluate.command = 'python comet.py; a:b --gpus 1'\n    return config\n"
    )
    run_config_file(Path(tmp_path / "own.py"))
    assert plugins._allowed == {mine, "a.b", "python comet.py", "a:b --gpus 1"}


def test_the_run_of_a_stranger_imports_nothing(mine, tmp_path, capsys):
    """The command says in one line which module it did not import, and what to do."""
    plugins.allow(mine)
    values = config_of(mine)
    values.data.cache_dir = str(tmp_path / "cache")
    save_config(resolve(values), epath.Path(tmp_path) / "config.json")
    (tmp_path / f"{mine}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    plugins._allowed.clear()
    assert main(["jformer", f"--workdir={tmp_path}"]) == 2
    assert f"set JFORMER_PARTS={mine}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "imported").exists()


def test_a_part_that_is_defined_again_takes_the_place_of_what_was_cached(mine):
    plugins.allow(mine)
    calls = []

    @plugins.cached(4)
    def built(key):
        calls.append(key)
        return plugins.find("data.source", f"{mine}:part", TABLE)(None, key)

    assert [built("x"), built("x"), calls] == ["x", "x", ["x"]]
    sys.modules[mine].part = lambda config, split: split.upper()
    assert [built("x"), built("x"), calls] == ["X", "X", ["x", "x"]]
    key = ["not hashable"]
    sys.modules[mine].part = lambda config, split: len(split)
    assert [built(key), built(key), len(calls)] == [1, 1, 4]


def test_parameters_are_those_of_the_layer_as_it_is_defined_now(mine):
    plugins.allow(mine)
    module = importlib.import_module(mine)
    sizes = {"vocab_size": 9, "num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2}
    config = ModelConfig("decoder", feed_forward=f"{mine}:Layer", **sizes)

    class Longer(FeedForward):
        def setup(self):
            super().setup()
            self.more = nn.Dense(8)

        def __call__(self, x, dropout_key=None):
            return super().__call__(x, dropout_key) + self.more(x)

    names = []
    for module.Layer in (FeedForward, Longer):
        params = init_params(build_model(config), jax.random.key(0))
        names.append({*params["decoder"]["block"]["feed_forward"]})
    assert names[1] - names[0] == {"more"}


def test_the_digest_is_that_of_the_code_that_was_imported(mine, tmp_path):
    plugins.allow(mine)
    name, file = f"{mine}:part", tmp_path / f"{mine}.py"
    before = plugins.digests([name])
    file.write_text(file.read_text() + "\n\nmore = 2\n")
    assert plugins.digests([name]) == plugins.digests_of_imported([name]) == before
    importlib.reload(sys.modules[mine])
    assert plugins.digests([name]) == plugins.digests_of_imported([name]) != before
