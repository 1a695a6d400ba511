import contextlib
import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jformer import main
from jformer.config import default_config, load_config, options, save_config
from jformer.config.options import Config
from jformer.data import progress
from jformer.data.data_config import DataConfig
from jformer.errors import UserError
from jformer.parallel.processes.children import free_port
from jformer.storage import replace_content
from tests.faults.full_disk import no_file_above
from tests.stored_run import store_run

ROOT = Path(__file__).parents[1]
FILE = """
from jformer.config import default_config
def get_config():
    config = default_config("transformer_tiny")
    {body}
    return config
"""


@pytest.fixture
def file(tmp_path):
    """Return a function: lines of get_config → the path of a config file that has them."""

    def write(body="", text=FILE):
        path = tmp_path / "my_config.py"
        path.write_text(text.format(body=body))
        return path

    return write


def call(*arguments):
    return main.main(["jformer", *map(str, arguments)])


def parse(*arguments):
    return main.configure(*main.read_flags(["jformer", *map(str, arguments)]))


def test_a_tilde_is_home_although_shells_leave_it_in_an_option(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file().parent))
    assert parse("--config=~/my_config.py", "--workdir=x") == parse(f"--config={file()}", "--workdir=x")


@pytest.mark.parametrize("flag", ["--help", "-h", "-help"])
def test_help_names_every_mode_and_flag(capsys, flag):
    assert call(flag, "--nonsense") == 0
    said = capsys.readouterr().out
    names = ("config", "workdir", "mode", "input", "output", "shard", "resume", "format")
    for word in (*(f"--{name}" for name in names), *main.MODES, *main.FORMATS):
        assert word in said


def test_a_new_run_without_a_config_has_that_of_the_run_it_starts_from(file, tmp_path):
    parent = store_run(tmp_path / "parent", {"model.d_model": 24, "model.num_heads": 3, "model.dropout": 0.25})
    arguments = [f"--workdir={tmp_path / 'new'}", f"--config.train.init_from={parent}", "--config.model.dropout=0.5"]
    config = parse(*arguments)
    assert (config.model.d_model, config.model.num_heads, config.model.dropout) == (24, 3, 0.5)
    assert config.train.init_from == str(parent)
    assert parse(*arguments[1:], "--mode=prepare") == config
    assert parse(*arguments, f"--config={file()}").model.d_model != 24
    config_path = parent / "config.json"
    saved = load_config(config_path)
    data = dataclasses.replace(saved.data, row_multiple=24, length_multiple=128)  # as its devices had them
    steps = dataclasses.replace(saved.train, num_epochs=3.0, num_steps=77, source_vectors="v.txt")  # as its text had
    save_config(dataclasses.replace(saved, data=data, train=steps), config_path)
    again = parse(*arguments)
    assert (again.data.row_multiple, again.data.length_multiple, again.train.num_epochs) == (0, 0, 3.0)
    assert (again.train.num_steps, again.train.source_vectors) == (default_config().train.num_steps, "")
    with pytest.raises(UserError, match="holds no run"):
        parse(*arguments, "--mode=predict")


@pytest.mark.parametrize("key", ["data.test", "evaluate.scores"])
def test_nothing_is_an_empty_list(file, key):
    section, name = key.split(".")
    assert getattr(getattr(parse(f"--config={file()}", "--workdir=x", f"--config.{key}="), section), name) == ()


MISTAKES = {
    "an unknown flag": (["--confg=x"], "confg"),
    "a flag without its dashes": (["config=x"], "unexpected argument 'config=x'"),
    "an unknown mode": (["--mode=trian"], "trian"),
    "no workdir": (["--config={file}", "--workdir="], "--workdir is missing"),
    "an export to nothing": (["--config={file}", "--mode=export", "--output=x"], "--mode=export needs --format and a"),
    "a share that is none": (["--config={file}", "--mode=prepare", "--shard=2/2"], "--shard=2/2 is not I/N"),
    "a share of training": (["--config={file}", "--shard=0/2"], "--mode=train does not read --shard"),
    "an origin for answers": (["--mode=predict", "--workdir=x", "--against=y"], "does not read --against"),
    "a price of nothing": (["--mode=describe", "--config={file}", "--price=2"], "--price needs --topology"),
    "no activations": (["--mode=predict", "--activations="], "--activations= names none"),
    "an output of training": (["--config={file}", "--output=x"], "--mode=train does not read --output"),
    "an export to nowhere": (["--config={file}", "--mode=export", "--format=stablehlo"], "a folder as --output"),
    "no config and no run": (["--config="], "--config is missing"),
    "no run to predict with": (["--config=", "--mode=predict"], "run holds no run: name the directory of one"),
    "a config file that is not there": (["--config=configs/nope.py"], "--config=configs/nope.py: no such Python file"),
    "a folder as config file": (["--config={folder}"], "no such Python file"),
    "a typo": (["--config={file}", "--config.model.num_layer=2"], "model.num_layer; did you mean model.num_layers?"),
    "a key without its section": (["--config={file}", "--config.d_modl=2"], "d_modl; did you mean model.d_model?"),
    "a key like no other": (["--config={file}", "--config.zzz=2"], "zzz; the sections are data, decode"),
    "a section": (["--config={file}", "--config.model=2"], "model; it is a section: set one of its keys"),
    "a word for a number": (["--config={file}", "--config.model.num_layers=two"], "--config.model.num_layers=two"),
    "a fraction for a count": (["--config={file}", "--config.model.num_layers=2.5"], "--config.model.num_layers=2.5"),
    "a bool for a count": (["--config={file}", "--config.train.num_steps=True"], "--config.train.num_steps=True"),
    "nan": (["--config={file}", "--config.optim.learning_rate=nan"], "optim.learning_rate=nan must be a finite number"),
    "a number for a bool": (["--config={file}", "--config.evaluate.lowercase=2"], "--config.evaluate.lowercase=2"),
    "a number in a list of names": (["--config={file}", "--config.data.test=3"], "data.test[0]=3 must be a text"),
    "no value": (["--config={file}", "--config.seed"], "--config.seed"),
    "a value of two lines": (["--config={file}", "--config.seed=1\n2"], "--config.seed=1 2"),
    "a path of two lines": (["--config=a\nb.py"], "--config=a b.py: no such Python file"),
    "a whole number": (["--config={file}", "--config.train.num_steps=2e2"], "=2e2 must be a whole number: 200"),
    "no number": (["--config={file}", "--config.train.num_steps=many"], "num_steps=many must be a whole number\n"),
    "too long a name": (["--config={file}", f"--config.data.dir={5_000 * 'x'}"], "xxx… is longer than a file name"),
    "no data": (["--config={file}", "--config.data.dir={folder}/nope"], "nope' is not a folder"),
    "an unknown task": (["--config={file}", "--config.task=transalte"], "task='transalte'; choose one of"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2(mistake, file, tmp_path, capsys):
    arguments, expected = MISTAKES[mistake]
    filled = [argument.format(file=file(), folder=tmp_path) for argument in arguments]
    assert call(f"--workdir={tmp_path / 'run'}", *filled) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jformer: ")
    assert err.count("\n") == 1
    assert expected in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("option", ["--workdir", "--config.data.cache_dir"])
def test_a_place_that_cannot_be_written_is_named_before_the_work(saved, file, tmp_path, capsys, mode, option):
    (tmp_path / "file").write_text("")
    place = f"{option}={tmp_path / 'file' / 'run'}"
    other = f"--config={file()}" if option == "--workdir" else f"--workdir={saved}"
    assert call(f"--mode={mode}", place, other) == 2
    err = capsys.readouterr().err
    assert err.endswith(f"/file/run: {tmp_path / 'file'} is a file; name a folder that can be written\n")


def test_scores_of_a_newer_version_are_noticed_before_training(saved, capsys):
    (saved / "results.json").write_text('{"schema": 99}')
    assert call("--mode=train", f"--workdir={saved}") == 2
    assert "results.json: schema=99, and this version of jformer reads up to" in capsys.readouterr().err


def test_scores_that_cannot_be_written_are_named_before_the_work(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert call("--mode=evaluate", f"--workdir={saved}", f"--output={tmp_path}/file/scores") == 2
    assert f"--output={tmp_path}/file/scores: {tmp_path / 'file'} is a file" in capsys.readouterr().err


BROKEN = {
    "config.model.num_layer = 2": "my_config.py:5: unknown config key model.num_layer; did you mean model.num_layers?",
    "config.model.update(num_layer=2)": "unknown config key model.num_layer; did you mean model.num_layers?",
    "config.model.update(\n        num_layer=2)": "unknown config key model.num_layer; did you mean model.num_layers?",
    "print(config.model.num_layer)": "unknown config key model.num_layer; did you mean model.num_layers?",
    "config.seeed = 2": "unknown config key seeed; did you mean seed?",
    "config.modle.num_layers = 2": "my_config.py:5: unknown config key modle; did you mean model?",
    "config['modell'].num_layers = 2": "unknown config key modell; did you mean model?",
    "config.num_layers = 2": "unknown config key num_layers; did you mean model.num_layers?",
    "config['model']['zzzzz'] = 2": "unknown config key zzzzz; the sections are",
    "dict(b=1)['a']": "my_config.py:5: KeyError: 'a'",
    "1 / 0": "my_config.py:5: ZeroDivisionError: division by zero",
    "raise SystemExit(0)": "my_config.py:5: SystemExit: 0",
    "return": "my_config.py: get_config() returns nothing; end it with: return config",
    "return [config]": "get_config() returns a list, not a config; end it with: return config",
    "config.train.num_steps = 10**400": "train.num_steps=",
    "config.optim.learning_rate = 10**400": "my_config.py:5: OverflowError: int too large to convert to float",
    "config.model.num_layers = 'two'": "num_layers",
    "config = default_config('transformer_bas')": "unknown preset 'transformer_bas'; did you mean transformer_base?",
    "config.optim.learning_rate = True": "my_config.py:5: learning_rate=True must be a finite number",
    "config.train.update(max_minutes=False)": "my_config.py:5: max_minutes=False must be a finite number",
    "config.train.num_steps = True": "train.num_steps=True must be a whole number",
}


@pytest.mark.parametrize("body", BROKEN)
def test_a_mistake_in_the_file_is_one_line_too(body, file, tmp_path, capsys):
    assert call(f"--config={file(body)}", f"--workdir={tmp_path / 'run'}") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert BROKEN[body] in err


def test_an_error_in_a_file_of_the_current_folder_names_its_line(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(file("1 / 0").parent)
    assert call("--config=my_config.py", f"--workdir={tmp_path / 'run'}") == 2
    assert "--config=my_config.py:5: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "line"), [("x = (\n", 5), ("x = 1\n", 6)])
def test_an_error_in_an_imported_file_names_the_line_of_the_import(file, tmp_path, monkeypatch, capsys, module, line):
    (tmp_path / "own_values.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_values", raising=False)
    config = file("import own_values\n    exec('x = 1\\ny = (')")
    assert call(f"--config={config}", f"--workdir={tmp_path / 'run'}") == 2
    assert f"my_config.py:{line}: '(' was never closed (" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "error"), [("\0", "source code string cannot contain null bytes"), ("x = 1", "has no get_config()")]
)
def test_a_file_that_is_no_config_is_named(file, tmp_path, capsys, text, error):
    assert call(f"--config={file(text=text)}", f"--workdir={tmp_path}") == 2
    said = capsys.readouterr().err.replace("ValueError: ", "")  # which Python 3.11.2 raises for a null byte
    assert f"my_config.py: {error}" in said


def test_the_traceback_of_a_defect_is_kept(file, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "prepare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call(f"--config={file()}", f"--workdir={tmp_path}")


def test_overrides_take_the_type_of_what_they_replace(file):
    given = {
        "seed": ("7", 7),
        "model.dropout": ("0", 0.0),
        "optim.learning_rate": ("3e-4", 3e-4),
        "data.name": ("a=b,c", "a=b,c"),
        "data.vocab_shared": ("true", True),
        "data.split_digits": ("1", True),
        "data.test": ("('a=x','b')", ("a=x", "b")),
        "train.freeze": ("^encoder/", ("^encoder/",)),
    }
    config = parse(
        f"--config={file()}", "--workdir=run", *(f"--config.{key}={text}" for key, (text, _) in given.items())
    )
    flat = options.flatten(dataclasses.asdict(config))
    for key, (_, value) in given.items():
        assert flat[key] == value
        assert type(flat[key]) is type(value)


def test_the_other_forms_of_a_bool_and_the_last_of_two_values(file):
    base = (f"--config={file('config.evaluate.lowercase = True')}", "--workdir=run")
    assert parse(*base).evaluate.lowercase
    assert not parse(*base, "--noconfig.evaluate.lowercase").evaluate.lowercase
    assert parse(*base, "--config.evaluate.lowercase=false", "--config.evaluate.lowercase").evaluate.lowercase
    assert parse("--config.seed=3", *base, "--config.seed=4").seed == 4


def test_a_file_sets_what_overrides_then_replace(file):
    path = file("config.train.num_steps = 5_000; config.decode.beam_size = 2")
    config = parse(f"--config={path}", "--workdir=run", "--config.decode.beam_size=9")
    assert (config.train.num_steps, config.decode.beam_size) == (5_000, 9)


@pytest.fixture
def saved(tmp_path):
    """Write the config of a run as training does, and return its workdir."""
    config = dataclasses.replace(Config(), seed=5)
    save_config(config, tmp_path / "config.json")
    return tmp_path


@pytest.mark.parametrize("mode", main.MODES)
def test_a_run_is_enough_without_a_config_file(saved, mode):
    target = ("--format=stablehlo", "--output=x") if mode == "export" else ()
    config = parse(f"--workdir={saved}", f"--mode={mode}", *target, "--config.decode.beam_size=7")
    assert (config.seed, config.decode.beam_size) == (5, 7)


@pytest.mark.parametrize("mode", ["predict", "score", "explore", "report"])
@pytest.mark.parametrize("name", ["config.json", "link", "tokenizer/source.json"])
def test_an_output_that_is_a_file_of_the_run_is_refused(saved, capsys, mode, name):
    (saved / "tokenizer").mkdir()
    (saved / "tokenizer" / "source.json").write_text("{}")
    (saved / "link").symlink_to("config.json")
    before = (saved / name).read_bytes()
    assert call(f"--workdir={saved}", f"--mode={mode}", f"--output={saved / name}") == 2
    assert "is a file of the run and would be overwritten" in capsys.readouterr().err
    assert (saved / name).read_bytes() == before


def test_a_given_file_wins_over_the_saved_config_when_training(saved, file):
    assert parse(f"--workdir={saved}", f"--config={file()}").seed == 0


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
def test_another_model_than_the_runs_is_refused_before_anything_is_loaded(saved, mode, capsys):
    assert call(f"--workdir={saved}", f"--mode={mode}", "--config.model.d_ff=64") == 2
    assert "model.d_ff=64 but this workdir was trained with 2048" in capsys.readouterr().err


def answer_with(monkeypatch, module, name, result=None, seconds=0.0):
    """Put a function that takes some time in the place of a mode's, and return the list of what it is called with."""
    calls = []

    def called(config, *arguments):
        calls.append(arguments)
        time.sleep(seconds)
        return result

    replaced = SimpleNamespace(**{name: called})
    monkeypatch.setitem(sys.modules, f"jformer.{module}", replaced)
    monkeypatch.setattr(f"jformer.{module}", replaced, raising=False)  # where it is imported from its package
    return calls


@pytest.mark.parametrize(("mode", "further"), [("predict", ()), ("score", ()), ("embed", (None,))])
def test_files_are_answered_and_resumed(saved, monkeypatch, mode, further):
    calls = answer_with(monkeypatch, "inference.answer_files", f"{mode}_file")
    assert call(f"--workdir={saved}", f"--mode={mode}") == 0
    assert call(f"--workdir={saved}", f"--mode={mode}", "--input=a", "--output=b", "--resume") == 0
    assert calls == [(saved, "-", "-", False, *further), (saved, "a", "b", True, *further)]


def test_several_processes_get_the_limit_for_stuck_ones(saved, monkeypatch):
    limits = []
    answer_with(monkeypatch, "inference.answer_files", "predict_file")
    monkeypatch.setattr(main.processes, "set_stall_limit", limits.append)
    assert call(f"--workdir={saved}", "--mode=predict", "--config.train.stall_seconds=7") == 0
    assert limits == [7]


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_check_that_fails_is_exit_code_1(saved, monkeypatch, passed, code):
    calls = answer_with(monkeypatch, "inference.verify", "verify", passed)
    assert call(f"--workdir={saved}", "--mode=verify") == code
    answer_with(monkeypatch, "tools.hf.against", "check_against", "a check")
    assert call(f"--workdir={saved}", "--mode=verify", "--against=origin") == code
    assert calls == [(saved, []), (saved, ["a check"])]


def test_export_says_what_it_wrote(saved, monkeypatch, capsys):
    calls = answer_with(monkeypatch, "tools.export.folder", "export", "written")
    assert call(f"--workdir={saved}", "--mode=export", "--format=stablehlo", "--output=served") == 0
    assert calls == [(saved, "stablehlo", "served")]
    assert capsys.readouterr().out == "written\n"


@pytest.mark.parametrize(
    ("mode", "module", "options"),
    [("export", "tools.export.folder", ("--format=stablehlo", "--output=x")), ("explore", "tools.pages.explorer", ())],
)
def test_what_takes_long_is_reported(saved, monkeypatch, capsys, mode, module, options):
    monkeypatch.setattr(progress, "SILENCE", (0.01, 0.01))
    answer_with(monkeypatch, module, mode, "written", seconds=0.1)
    assert call(f"--workdir={saved}", f"--mode={mode}", *options) == 0
    assert f"{mode.rstrip('e')}ing: 0:00\n" in capsys.readouterr().err


def test_what_is_compiled_is_kept_beside_the_data_or_where_the_environment_says(monkeypatch, tmp_path):
    import jax

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    config = dataclasses.replace(Config(), data=DataConfig(cache_dir=str(tmp_path)))
    main.keep_compiled(config)
    assert [getattr(jax.config, name) for name in names] == before  # the tests have a place of their own
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    try:
        main.keep_compiled(config)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compiled")
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)


def test_a_damaged_saved_config_is_named(saved, capsys):
    (saved / "config.json").write_text('{"seed": 1')
    assert call(f"--workdir={saved}", "--mode=evaluate") == 2
    err = capsys.readouterr().err
    assert "config.json: cannot be read as a saved config" in err
    assert err.count("\n") == 1


def test_describe_needs_no_workdir_and_prints_the_parameters_of_the_base_model(capsys):
    assert call(f"--config={ROOT / 'configs' / 'wmt14_en_de_base.py'}", "--mode=describe") == 0
    out, err = capsys.readouterr()
    # 6 blocks a side of 4 or 8 projections of 512, 2 feed-forwards of 2,048, their biases and norms; 37,000 rows
    block = 4 * (512 * 512 + 512) + 2 * 512 * 2_048 + 2_048 + 512
    norm = 2 * 512
    layers = 6 * (block + 2 * norm) + 6 * (block + 4 * (512 * 512 + 512) + 3 * norm)
    total = next(line.split() for line in out.splitlines() if line.startswith("total"))
    assert total == ["total", f"{layers + 37_000 * 512:,}", "100.0%"]
    assert err == ""


QUICK = """
import sys
from jformer import main
code = main.main(["jformer", *sys.argv[1:]])
heavy = {"jax", "flax", "optax", "orbax", "sentencepiece", "sacrebleu", "babel", "tensorflow_datasets"}
sys.exit(f"imported {heavy & set(sys.modules)}" if heavy & set(sys.modules) else code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["--config=configs/quickstart.py", "--workdir=run", "--config.model.num_layer=2"], 2)],
)
def test_help_and_typos_are_answered_without_importing_jax(arguments, code):
    done = subprocess.run(
        [sys.executable, "-c", QUICK, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr


PIPED = """
import sys
from types import SimpleNamespace
from jformer import main
main.keep_compiled = lambda config: None
answer = lambda *_: [print("x" * 100_000, flush=True) for _ in range(100)]
sys.modules["jformer.inference.answer_files"] = SimpleNamespace(predict_file=answer)
sys.exit(main.main(["jformer", "--mode=predict", f"--workdir={sys.argv[1]}"]))
"""


def test_who_stops_reading_the_answers_sees_no_traceback(saved):
    command = [sys.executable, "-c", PIPED, str(saved)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


FULL = PIPED.replace(", flush=True", "")  # written in blocks, and the last one while Python ends


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(saved):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", FULL, str(saved)], cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(
        b"jformer: a file, or standard output: could not be written (No space left on device)"
    )
    assert done.returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_of_one_process_is_a_line_of_all(saved):
    program = PIPED.replace('argv[1]}"]', 'argv[1]}", *sys.argv[2:]]').replace(" * 100_000", "")
    place = [f"--coordinator=127.0.0.1:{free_port()}", "--processes=2"]
    with Path("/dev/full").open("wb") as full, contextlib.ExitStack() as stack:
        both = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(saved), *place, f"--process={i}"], cwd=ROOT, text=True,
                stdout=[full, subprocess.DEVNULL][i], stderr=subprocess.PIPE,
            )
            for i in range(2)
        ]  # fmt: skip
        said = [stack.enter_context(process).stderr.read() for process in both]
    said = ["".join(line for line in text.splitlines(True) if "waiting for" not in line) for text in said]
    line = "a file, or standard output: could not be written (No space left on device)"
    assert [text.count("\n") for text in said] == [1, 1]
    assert said[0].startswith(f"jformer: {line}")
    assert said[1].startswith("jformer: process 0 (")
    assert line in said[1]
    assert [process.returncode for process in both] == [2, 2]


def test_a_full_disk_is_one_line_that_names_the_file(saved, monkeypatch, capsys):
    def export(*_):
        with no_file_above(100):
            replace_content(saved / "results.json", b"x" * 1_000)

    monkeypatch.setitem(sys.modules, "jformer.tools.export.folder", SimpleNamespace(export=export))
    assert call(f"--workdir={saved}", "--mode=export", "--format=stablehlo", f"--output={saved}/x") == 2
    line = f"jformer: {saved}/results.json: could not be written (File too large); free some space, then"
    assert capsys.readouterr().err.splitlines()[-1].startswith(line)
    assert not list(saved.glob("results*"))


def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path, capsys):
    run = store_run(tmp_path / "run")
    (run / "samples.jsonl").mkdir()
    assert call(f"--workdir={run}", "--mode=report", f"--output={tmp_path}/page.html") == 2
    said = f"jformer: {run}/samples.jsonl: Is a directory; move it away, or make it readable and writable\n"
    assert capsys.readouterr().err == said


def test_help_ends_quietly_when_its_reader_leaves():
    with subprocess.Popen(
        [sys.executable, "-m", "jformer.main", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.wait(60) == 0
        assert "Traceback" not in process.stderr.read()
