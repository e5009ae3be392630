"""A model is published by the hub's own client, at a hub on this machine; what prevents it is found before any work."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.checkpoint.state import State
from megarl.commands import export
from megarl.config.faults import ConfigError
from tests.support.hub_server import TOKEN, Repository, hub_server
from tests.support.programs import PYTHON, run_program

PUBLISH = """
import sys
from pathlib import Path
from megarl.checkpoint.publish import create_repository, upload
create_repository("ann/model", private="private" in sys.argv)
print(upload(Path(sys.argv[1]), "ann/model"))
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (directory := tmp_path / "out put").mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "README.md").write_text("# a model\n")
    (directory / "model.safetensors").write_bytes(bytes(range(256)))
    return directory


def publish(out: Path, *words: str) -> tuple[int, str]:
    return run_program(sys.executable, "-c", PUBLISH, out, *words, timeout_s=120)


def make_run(directory: Path) -> Path:
    (checkpoint := directory / "global_step_2").mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(asdict(State(step=2, files={}))))
    return directory


@pytest.mark.parametrize("private", [False, True])
def test_new_repository_has_all_files(
    private: bool, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        code, printed = publish(out, *["private"] * private)
        assert (code, printed.splitlines()[-1]) == (0, f"{hub.address}/ann/model"), printed
        repository = hub.repositories["models/ann/model"]
    assert repository.private == private
    assert repository.files == {path.name: path.read_bytes() for path in out.iterdir()}


def test_existing_repository_keeps_its_other_files(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        hub.add("models/ann/model", {"LICENSE": b"mine", "config.json": b"old"})
        code, printed = publish(out)
        assert code == 0, printed
        files = hub.repositories["models/ann/model"].files
        assert (files["LICENSE"], files["config.json"]) == (b"mine", b"{}")
        code, printed = publish(out, "private")
        assert "ann/model exists and is public" in printed and code == 1


def test_failed_upload_names_later_command(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        hub.fails_at = "/preupload/"
        code, printed = publish(out)
    assert code == 1
    assert "the upload to ann/model failed: " in printed
    assert f"  hf upload ann/model '{out}'" in printed
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("HF_TOKEN", "", "there is no token of the Hugging Face hub: set HF_TOKEN, or run `hf auth login`"),
        ("HF_TOKEN", "hf_wrong", "401 Unauthorized"),
        ("HF_ENDPOINT", "http://127.0.0.1:9", "Connection refused"),
        ("HF_HUB_OFFLINE", "1", "offline mode is enabled"),
        ("HF_TOKEN", TOKEN, "You may not write here"),
    ],
)
def test_obstacles_are_found_before_the_work(
    variable: str, value: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out = make_run(tmp_path / "run"), tmp_path / "out"
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        monkeypatch.setenv(variable, value)
        hub.repositories["models/ann/model"] = Repository(writable=False)
        code, printed = run_program(*PYTHON, "megarl", "export", run_dir, out, "--push-to", "ann/model", timeout_s=120)
    assert code == 2
    assert printed.startswith("1 fault in the configuration:\n  --push-to: "), printed
    assert words in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (["--push-to", "model"], "--push-to", "model is not OWNER/NAME"),
        (["--push-to", "ann/my model"], "--push-to", "the Hugging Face hub allows no such name"),
        (["--private"], "--private", "name the repository with --push-to"),
    ],
)
def test_impossible_names_are_faults(options: list[str], key: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export.read_arguments([str(make_run(tmp_path / "run")), str(tmp_path / "out"), *options], world_size=None)
    (fault,) = caught.value.faults
    assert fault.path == key
    assert words in fault.message


def test_other_ranks_wait_for_an_upload(tmp_path: Path) -> None:
    named = [str(make_run(tmp_path / "run")), str(tmp_path / "out")]
    pushed = export.read_arguments([*named, "--push-to", "ann/model"], world_size=None)
    plain = export.read_arguments(named, world_size=None)
    assert pushed.trainer.phase_timeout_s > 86400 > plain.trainer.phase_timeout_s
