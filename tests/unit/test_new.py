"""`megarl new`: the commands and files of a new project work as they are written."""

import re
import shlex
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from megarl.commands.explain import main as config
from megarl.commands.new.__main__ import DATA, FILES, main
from megarl.commands.prepare import main as prepare
from megarl.tracking.mlflow_place import database_of
from tests.support.programs import succeed
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint

SHORT = (
    "data.max_prompt_length=32",
    "data.max_response_length=16",
    "data.truncation=left",
)  # as the tiny model has room


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
    train_sentencepiece(directory / "tokenizer.model", vocab_size=200)
    return directory


@pytest.mark.parametrize("task", ["own", "countdown"])
def test_a_new_project_works(
    task: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "my boxes"
    assert main([str(project), "--task", task, "--model", str(model)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[:-1] == [str(project / name) for name in ("config.yaml", "README.md", *FILES[task])]
    monkeypatch.chdir(project)
    assert "does what its test says" in succeed(sys.executable, "test_reward.py", timeout_s=60, cwd=project)
    commands = re.findall(r"^```bash\n(.*?)^```", (project / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    data, plan, train, export = map(shlex.split, commands[0].splitlines())
    assert [command[:2] for command in (plan, train, export)] == [
        ["megarl", name] for name in ("plan", "train", "export")
    ]
    store = f"sqlite:///{database_of(Path('run')).relative_to(project)}"  # config.yaml: trainer.default_local_dir
    assert store in (project / "README.md").read_text()
    prepare(data[2:])
    assert "row 2 of train as the model reads it" in capsys.readouterr().out
    assert pq.read_table("data/train.parquet").num_rows > pq.read_table("data/val.parquet").num_rows > 0
    assert config(["--check", *train[2:], *SHORT]) == 0
    assert "no faults" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["own", "countdown"])
def test_tiny_project_has_a_model(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "tiny"
    assert main([str(project), "--task", task, "--tiny"]) == 0
    assert re.fullmatch(r"starting: import .*\na model of 1,219,392 parameters .*\n", capfd.readouterr().err)
    monkeypatch.chdir(project)
    commands = re.findall(r"^```bash\n(.*?)^```", Path("README.md").read_text(), re.MULTILINE | re.DOTALL)
    data, _, train, _ = map(shlex.split, commands[0].splitlines())
    prepare(data[2:])
    assert config(["--check", *train[2:]]) == 0
    assert (project / "model" / "model.safetensors").is_file()


def test_tiny_model_and_download_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "tiny"), "--task", "gsm8k", "--tiny"]) == 1
    assert "take countdown or own" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_every_task_has_a_command_and_files(tmp_path: Path) -> None:
    assert DATA.keys() == FILES.keys()
    for task in FILES:
        assert main([str(tmp_path / task), "--task", task]) == 0
        assert "path: Qwen/" in (tmp_path / task / "config.yaml").read_text()


@pytest.mark.parametrize(
    "name", ["a: b", "yes", "123", "#x", "{x}", "[a]", "null", "1e3", "-x", "x, 'y' ü😀", 'q"', "plain-1"]
)
def test_names_of_any_form_are_texts_of_yaml(name: str, tmp_path: Path) -> None:
    (model := tmp_path / "models" / name).mkdir(parents=True)
    assert main(["--model", str(model), "--", str(tmp_path / name)]) == 0
    tree = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
    assert tree["trainer"]["project_name"] == name
    assert tree["actor_rollout_ref"]["model"]["path"] == str(model)


def test_a_directory_in_use_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").touch()
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path} is not empty: name a new directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["file", "file/x", "x" * 300, "/proc/none"])
def test_directory_creation_failure_is_named_with_remedy(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main([str(tmp_path / name)]) == 1
    printed = capsys.readouterr().err
    assert f"megarl: DIR={tmp_path / name} cannot be written: " in printed
    assert "name another" in printed or "shorter name" in printed
    assert "Errno" not in printed
