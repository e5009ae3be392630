"""The command `megarl`: its table, its help, its version, its mistakes, and the completion of shells."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from click.shell_completion import ShellComplete

import megarl
from megarl.__main__ import main
from megarl.commands.cli import version
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import COMMANDS, EXPORT, MEGARL, PLAN, TRAIN
from megarl.commands.evaluate import as_configuration, with_best
from megarl.commands.plan import main as plan
from megarl.commands.prepare import tasks
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.platform.terminal import typed
from tests.support.programs import ROOT, AtTerminal, run_program, succeed

HEAVY = "{'torch', 'vllm', 'transformers', 'megatron', 'mlflow'}"
HELP_OF_ALL = f"""
import contextlib, io, sys
from megarl.__main__ import main
for argv in ([], *([command] for command in {[str(command.name) for command in COMMANDS]}), *{{more}}):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main([*argv, "--help"])
        except SystemExit as ending:
            assert not ending.code, argv
    print("HELP OF", *argv)
    print(printed.getvalue())
assert not {HEAVY} & sys.modules.keys(), {HEAVY} & sys.modules.keys()
"""


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str]:
    """Return the exit code of a command and all that it prints."""
    with pytest.raises(SystemExit) as ending:
        main(argv)
    captured = capsys.readouterr()
    return ending.value.code, captured.out + captured.err


def test_help_of_every_command_imports_nothing_heavy() -> None:
    more = [["prepare", name] for name in tasks()]
    printed = succeed(sys.executable, "-c", HELP_OF_ALL.replace("{more}", str(more)), timeout_s=120)
    for text in printed.split("HELP OF")[2:]:  # the first is that of `megarl` itself
        name = text.splitlines()[0].strip()
        assert f"\nUsage: megarl {name} " in text, text
        assert re.search(rf"Example:\n *megarl {name}", text), text
        assert "default: None" not in text
    for command in COMMANDS:
        assert re.search(rf"^  {command.name} ", printed, re.MULTILINE)


def test_configuration_check_imports_no_heavy_package() -> None:
    modules = [f"megarl.commands.{name}" for name in ("train", "sft", "train_reward", "evaluate", "export", "verify")]
    words = f"import sys, {', '.join(modules)}; assert not {HEAVY} & sys.modules.keys(), {HEAVY} & sys.modules.keys()"
    succeed(sys.executable, "-c", words, timeout_s=120)


def test_commands_print_no_warnings_of_libraries(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(SystemExit):
        main(["config", "optim.lr"])
    for module in ("megatron.core.optimizer", "somebody.elses"):
        warnings.warn_explicit("falling back", UserWarning, "optimizer.py", 24, module=module)
    assert [str(warning.message) for warning in recwarn] == ["falling back"]


def test_a_plan_imports_neither_megatron_nor_vllm() -> None:
    heavy = {"megatron", "vllm", "transformers"}
    words = f"import sys, megarl.planning.report; assert not {heavy} & sys.modules.keys(), {heavy} & sys.modules.keys()"
    succeed(sys.executable, "-c", words, timeout_s=120)


def test_verify_checks_model_before_heavy_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shown = (sys.executable, "-X", "importtime", "-m", "megarl", "verify", "org/nothere")
    code, output = run_program(*shown, timeout_s=120)
    assert code == 2, output
    assert "  actor_rollout_ref.model.path: org/nothere is no local directory" in output
    assert not re.search(r"\| +(torch|vllm|transformers)$", output, re.MULTILINE)


def test_commands_and_modules_match_one_to_one() -> None:
    listed = {command.module for command in COMMANDS}
    assert not [name for name in listed if find_spec(name) is None]
    files = {
        path for path in (ROOT / "megarl" / "commands").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()
    }
    own = {f"megarl.commands.{path.stem}" for path in files}
    assert own and own <= listed
    assert not [command.name for command in COMMANDS if not command.help]


@pytest.mark.parametrize(
    ("words", "option"),
    [(["-V"], ["--version"]), (["version"], ["--version"]), (["help"], ["--help"]), (["help", "plan"], ["plan", "-h"])],
)
def test_usual_words_mean_the_options(words: list[str], option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, *words) == shown(capsys, *option)


def test_the_version_names_commit_and_engine() -> None:
    printed = succeed(sys.executable, "-m", "megarl", "--version", timeout_s=60)
    assert printed.startswith(f"megarl {megarl.__version__}")
    assert re.search(r"vllm(-cpu)? \d", printed)
    if (ROOT / ".git").exists():
        head = succeed("git", "-C", ROOT, "rev-parse", "HEAD", timeout_s=60)
        assert head.startswith(str(re.search(r"commit (\w+)", printed)[1]))  # type: ignore[index]


def test_package_in_foreign_checkout_has_no_commit(tmp_path: Path) -> None:
    inner = tmp_path / "site-packages"
    inner.mkdir()
    succeed("git", "-C", tmp_path, "init", "-q", timeout_s=60)
    assert version.commit(inner) is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["versio"], "No such command 'versio'. Did you mean 'version'?"),
        (["hepl"], "No such command 'hepl'. Did you mean 'help'?"),
        (["xyz"], "No such command 'xyz'. 'megarl --help' lists all."),
        (["train", "x.yaml", "--reply", "samples"], "No such option '--reply'. Did you mean '--replay'?"),
        (["plan", "x.yaml", "--gpu-memory", "80"], "'80' is not a number with one of the units"),
        (["sweep", "x.yaml", "--over", "a.b"], "'a.b' is not KEY=VALUE,VALUE..."),
        (["export"], "Missing argument 'CHECKPOINT'"),
        (["train"], "Missing argument 'CONFIG.yaml"),
        (["evaluate"], "Missing argument 'RUN_DIR|CHECKPOINT|CONFIG.yaml"),
    ],
)
def test_mistakes_end_with_2_and_a_remedy(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = shown(capsys, *argv)
    assert code == 2
    assert words in printed


def test_messages_hide_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = shown(capsys, "doctor", "--api-key=Swordf1sh")
    assert code == 2
    assert "Swordf1sh" not in printed


def test_options_mix_with_keys_and_unknown_options_pass() -> None:
    found = parse(TRAIN, ["a.yaml", "--replay", "samples", "x.y=-1", "--learning_rate", "1e-6", "~z"])
    words = ("a.yaml", "x.y=-1", "--learning_rate", "1e-6", "~z")
    assert found == {"configuration": words, "replay": Path("samples"), "detach": False}
    assert parse(PLAN, ["a.yaml", "--json", "--host-memory=1GB"])["host_memory"] == 10**9


def completions(*words: str) -> list[tuple[str, str]]:
    """Return the kinds and values that complete the last word of a command line."""
    shell = ShellComplete(MEGARL, {}, "megarl", "_MEGARL_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trai",), ("plain", "train")),
        (("plan", "--gpu-m"), ("plain", "--gpu-memory")),
        (("train", "a.yaml", "data.train_f"), ("plain", "data.train_files=")),
        (("sweep", "a.yaml", "--over", "data.train_f"), ("plain", "data.train_files=")),
        (("sft", "optim.weight"), ("plain", "optim.weight_decay=")),
        (("train", "--reply", "trainer.nno"), ("plain", "trainer.nnodes=")),
        (("verify", ".", "trainer.nno"), ("plain", "trainer.nnodes=")),
        (("train", "confi"), ("file", "confi")),
        (("prepare", "count"), ("plain", "countdown")),
        (("prepare", "--che"), ("plain", "--check")),
        (("prepare", "--check", "data/tr"), ("file", "data/tr")),
        (("prepare", "own", "mine.csv", "--prom"), ("plain", "--prompt")),
        (("report", "--o"), ("plain", "--out")),
        (("report", "runs/a"), ("dir", "runs/a")),
    ],
)
def test_shells_complete_commands_options_and_keys(words: tuple[str, ...], expected: tuple[str, str]) -> None:
    assert expected in completions(*words)


def test_missing_checkpoint_is_refused_immediately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 10):
        (tmp_path / "run" / f"global_step_{step}" / "huggingface").mkdir(parents=True)
    (tmp_path / "run" / "global_step_2" / "huggingface" / "config.json").write_text("{}")
    for found in ("run", "run/global_step_2"):
        assert parse(EXPORT, [str(tmp_path / found), "out"])["checkpoint"] == tmp_path / found
    _, printed = shown(capsys, "export", str(tmp_path / "run" / "global_step_3"), "out")
    assert f"global_step_3 is no directory; {tmp_path / 'run'} has global_step_2, global_step_10" in printed
    _, printed = shown(capsys, "export", str(tmp_path), "out")
    assert f"{tmp_path} is neither a checkpoint nor a run with checkpoints\n" in printed
    (model := tmp_path / "sft" / "huggingface").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    _, printed = shown(capsys, "export", str(tmp_path / "sft"), "out")
    assert f"{tmp_path}/sft has no checkpoint, and {model} is exported already" in printed


@pytest.mark.parametrize(
    ("shell", "options"), [("bash", ("--norc", "--noprofile", "-i")), ("zsh", ("-f", "-i"))], ids=["bash", "zsh"]
)
def test_completed_key_is_followed_directly_by_value(shell: str, options: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (program := tmp_path / "megarl").write_text(
        f'#!/bin/sh\n[ -z "$_MEGARL_COMPLETE" ] && echo "given: $*" || exec {shlex.quote(sys.executable)} -m megarl\n'
    )
    program.chmod(0o755)
    terminal = AtTerminal(
        [shell, *options],
        os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    )
    begin = "autoload -U compinit; compinit -u; " if shell == "zsh" else ""
    terminal.type(f'{begin}eval "$(_MEGARL_COMPLETE={shell}_source megarl)"; echo rea""dy\n'.encode())
    terminal.read_until("ready\r\n")
    terminal.type(b"megarl train a.yaml trainer.test_f\t5 trainer.nnodes=1\nexit\n")
    assert "given: train a.yaml trainer.test_freq=5 trainer.nnodes=1" in terminal.end()[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str) -> None:
    asked = os.environ | {"_MEGARL_COMPLETE": f"{shell}_source", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "megarl"], env=asked, capture_output=True, text=True, check=True)
    assert "_MEGARL_COMPLETE" in done.stdout


def test_a_person_is_shown_the_command_as_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "megarl"
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "train", "my config.yaml", "a.b=c"])
    assert typed() == f"{shlex.quote(str(script))} train 'my config.yaml' a.b=c"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert typed() == "megarl train 'my config.yaml' a.b=c"
    monkeypatch.setattr(sys, "argv", ["/here/megarl/commands/train.py", "a.b=c"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "megarl", "train", "a.b=c"])
    assert typed() == "python -m megarl train a.b=c"


def test_both_names_of_command_report_same_fault(capsys: pytest.CaptureFixture[str]) -> None:
    faulty = ["configs/ppo_tinystories.yaml", "trainer.total_training_stepz=3"]
    code, printed = shown(capsys, "plan", *faulty)
    assert (plan(faulty), capsys.readouterr().err) == (code, printed)
    assert code == 2
    assert "did you mean trainer.total_training_steps?" in printed


def test_the_best_checkpoint_of_a_run_is_scored(tmp_path: Path) -> None:
    argv = ["data.train_files=a", "actor_rollout_ref.model.path=b", "critic.model.path=b"]
    argv = [*argv, f"trainer.default_local_dir={tmp_path}"]
    config = load_config(argv, world_size=None, check_paths=False)
    for step in (2, 4):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / "state.json").write_text('{"step": 4, "best": {"score": 0.5, "step": 2}}')
    trainer = with_best(config).trainer
    assert (trainer.resume_mode, trainer.resume_from_path) == ("resume_path", str(tmp_path / "global_step_2"))
    with pytest.raises(ConfigError, match=r"--best: names the best of a run, but .*global_step_2 is named too"):
        with_best(with_best(config))
    (tmp_path / "global_step_2" / "state.json").unlink()
    (tmp_path / "global_step_2").rmdir()
    with pytest.raises(ConfigError, match=r"--best: the best validation of .* there is no global_step_2: "):
        with_best(config)


@pytest.mark.parametrize("name", ["42", "null", "a: b", "[x]", "1e-6", "${x}", "\U0001f600"])
def test_run_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    tree = {"data": {"train_files": "a.parquet"}, "actor_rollout_ref": {"model": {"path": "m"}}}
    Path(name, "config.yaml").write_text(yaml.safe_dump(tree))
    argv = [*as_configuration(name), "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    assert load_config(argv, world_size=None, check_paths=False).trainer.default_local_dir == name


@pytest.mark.parametrize("name", ["run", "lr=1e-6,n=4"])
def test_a_run_or_a_checkpoint_is_a_configuration(name: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / name / "global_step_3"
    checkpoint.mkdir(parents=True)
    for directory in (checkpoint, checkpoint.parent):
        (directory / "config.yaml").write_text(yaml.safe_dump({"trainer": {"nnodes": 1}}))
    run_dir = checkpoint.parent
    assert as_configuration(str(run_dir)) == [
        str(run_dir / "config.yaml"),
        f"trainer.default_local_dir={run_dir}",
        "trainer.resume_mode=auto",
        "trainer.resume_from_path=null",
    ]
    assert as_configuration(str(checkpoint))[1:] == [
        f"trainer.default_local_dir={run_dir}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={checkpoint}",
    ]
    assert as_configuration("trainer.nnodes=2") == ["trainer.nnodes=2"]
    with pytest.raises(ConfigError, match=rf"global_step_4: is no directory; .*{name} has global_step_3"):
        as_configuration(str(run_dir / "global_step_4"))
    with pytest.raises(ConfigError, match=r"nothere: is no directory: name a run's directory, a checkpoint in it, or"):
        as_configuration(str(tmp_path / "nothere"))
    with pytest.raises(ConfigError, match=r"has no config.yaml: name a run's directory"):
        as_configuration(str(tmp_path))
