"""`megarl sweep`: names, checks and processes of its runs; a short program replaces `megarl train`."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from megarl.commands import sweep
from megarl.commands.cli.kinds import values_of_key
from megarl.commands.sweep import choices, combine, main, short_name
from megarl.config.faults import ConfigError
from megarl.config.load import load_config
from megarl.platform.early import EXIT_CODE
from tests.support.programs import CTRL_C, ROOT, AtTerminal
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint
from tests.support.workspace import NUM_TOKENS

LR = "actor_rollout_ref.actor.optim.lr"
N = "actor_rollout_ref.rollout.n"
ROW = {"prompt": "1+1=", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}}
CONFIG = {
    "actor_rollout_ref": {"model": {"path": "model"}, "actor": {"ppo_mini_batch_size": 4}, "rollout": {"n": 2}},
    "data": {"train_files": "rows.jsonl", "train_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8},
    "algorithm": {"adv_estimator": "grpo"},
    "reward_model": {"trial_rows": 0},
    "trainer": {"n_gpus_per_node": 1, "default_local_dir": "runs", "experiment_name": "base", "device": "cpu"},
}
TRAINS = """
import json, sys
from pathlib import Path
from megarl.config.load import load_config, to_yaml

config = load_config(sys.argv[1:], world_size=None, check_paths=False)
run_dir, lr = Path(config.trainer.default_local_dir), config.actor_rollout_ref.actor.optim.lr
print("starts", lr)
if lr == 1e-4 and not Path("mended").exists():
    sys.exit(3)
run_dir.mkdir(parents=True)
(run_dir / "config.yaml").write_text(to_yaml(config))
(run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "critic/score/mean": 0.25}) + "\\n")
(run_dir / "status.json").write_text(json.dumps({"state": "finished"}))
"""
WAITS = """
import os, signal, sys
from pathlib import Path

def end(number, frame):
    with open("signals", "a") as file:
        file.write(f"{number} ")
    signal.setitimer(signal.ITIMER_REAL, 0.5)

signal.signal(signal.SIGALRM, lambda *_: os._exit(75))
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
Path("started.part").write_text(f"{os.getpid()} {os.getpgrp()}")
Path("started.part").rename("started")
while True:
    signal.pause()
"""
SWEEP = """
import sys
from megarl.commands import sweep
sweep.PROGRAM = [sys.executable, "program.py"]
sys.exit(sweep.main(sys.argv[1:]))
"""
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("sweep") / "model", "llama")
    train_sentencepiece(checkpoint / "tokenizer.model", vocab_size=NUM_TOKENS, normalization_rule_name="identity")
    return checkpoint


@pytest.fixture
def here(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration that can start, and a program instead of `megarl train`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "program.py").write_text(TRAINS)
    monkeypatch.setattr(sweep, "PROGRAM", (sys.executable, "program.py"))
    return tmp_path


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("a.lr=1e-6,1e-5", "a.lr", {"1e-6": "1e-6", "1e-5": "1e-5"}),
        ("+a=[1,2],'b, c', null", "a", {"[1,2]": "[1,2]", "b, c": "'b, c'", "null": "null"}),
        ("a={b: 1},{c: x=y}", "a", {"{b: 1}": "{b: 1}", "{c: x=y}": "{c: x=y}"}),
        ("a=數,x", "a", {"數": "數", "x": "x"}),
    ],
)
def test_values_are_items_of_a_list(text: str, key: str, values: dict[str, str]) -> None:
    assert values_of_key(text) == (key, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "is not KEY=VALUE"),
        ("=1", "is not KEY=VALUE"),
        ("a=", "is not KEY=VALUE"),
        ("a=1,'1'", "has a value twice"),
        ("a=${b}", "quote a value that has a comma"),
        ("a=]", "quote a value that has a comma"),
    ],
)
def test_unreadable_values_are_refused(text: str, words: str) -> None:
    with pytest.raises(click.BadParameter, match=words):
        values_of_key(text)


def test_short_names_of_keys_stay_different() -> None:
    keys = [LR, "critic.optim.lr", N, "optim.lr"]
    assert [short_name(key, keys) for key in keys] == ["actor.optim.lr", "critic.optim.lr", "n", "optim.lr"]
    assert short_name(LR, [LR]) == "lr"


def test_every_combination_is_a_run_of_its_own(here: Path) -> None:
    over = [values_of_key(f"{LR}=1e-6,1e-5"), values_of_key("data.train_files=[rows.jsonl],rows.jsonl")]
    runs = list(combine(["run.yaml", f"{LR}=1"], choices(over, 2), Path("my sweep")))
    assert len({run.name for run in runs}) == 8
    assert runs[2].name == "lr=1e-6,train_files=rows.jsonl,seed=1"
    config = load_config(runs[-1].argv, world_size=None)
    trainer = config.trainer
    assert trainer.default_local_dir == f"my sweep/{runs[-1].name}"
    assert trainer.experiment_name == f"base-{runs[-1].name}"
    assert (config.actor_rollout_ref.actor.optim.lr, config.data.train_files) == (1e-5, "rows.jsonl")
    assert {config.data.seed, config.actor_rollout_ref.rollout.seed, config.actor_rollout_ref.actor.megatron.seed} == {
        2
    }


def test_names_of_long_values_differ() -> None:
    over = [values_of_key(f"a.b={'x' * 300},{'x' * 301},x/y,x_y,'x,y'"), values_of_key("a.c=1,2")]
    names = [run.name for run in combine([], choices(over, None), Path())]
    assert len(set(names)) == 10
    assert re.fullmatch(r"b=x_y-[0-9a-f]{12},c=1", names[4])
    assert max(map(len, names)) <= 120
    assert not any("/" in name for name in names)


@pytest.mark.parametrize(
    ("over", "seeds", "words"),
    [
        ([], None, "--over: is missing"),
        (["a=1", "a=2"], None, "a: is given twice"),
        (["trainer.experiment_name=x,y"], None, "trainer.experiment_name: cannot be in --over"),
        (["data.seed=1,2"], 2, "data.seed: cannot be in --over"),
    ],
)
def test_keys_that_cannot_be_swept(over: list[str], seeds: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choices(list(map(values_of_key, over)), seeds)


def test_faults_of_all_runs_are_named(here: Path, capsys: Captured) -> None:
    arguments = ["trainer.resume_mode=disable", "trainer.rollout_data_dir=samples", "--over", "data.train_files=x,y"]
    assert main(["run.yaml", "--over", f"{LR}=1e-6,few", *arguments]) == 2
    printed = capsys.readouterr().err
    assert "no such file: x: give data files" in printed
    assert "(in lr=1e-6,train_files=y and lr=few,train_files=y)" in printed
    assert f"{LR} [command line]: should be a valid number, not 'few' (in lr=few" in printed
    assert main(["run.yaml", "--seeds", "2", *arguments[:2], "trainer.nnodes=2"]) == 2
    printed = capsys.readouterr().err
    assert "trainer.resume_mode: must be auto in a sweep" in printed
    assert "trainer.nnodes: must be 1 in a sweep on this machine" in printed
    assert main(["run.yaml", "--seeds", "2", arguments[1]]) == 2
    printed = capsys.readouterr().err
    assert "trainer.rollout_data_dir: samples may be the place of several runs" in printed
    assert "(in all runs)" in printed
    assert not Path("runs").exists()
    own = "trainer.rollout_data_dir=samples/${trainer.experiment_name}"
    assert main(["run.yaml", "--seeds", "2", own, "--dry-run"]) == 0


def test_dry_run_prints_commands(here: Path, capsys: Captured) -> None:
    assert main(["run.yaml", "--over", f"{N}=2,4", "--out", "else where", "--dry-run"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [command[:4] for command in commands] == [["megarl", "train", "run.yaml", f"{N}={n}"] for n in (2, 4)]
    assert load_config(commands[1][2:], world_size=None).trainer.default_local_dir == "else where/n=4"
    assert not Path("else where").exists()


def test_failed_run_is_named_and_others_run(here: Path, capfd: Captured) -> None:
    arguments = ["run.yaml", "--over", f"{LR}=1e-3,1e-4,1e-5"]
    assert main(arguments) == 1
    printed = capfd.readouterr()
    assert "starts 0.001" in printed.out and "starts 1e-05" in printed.out
    assert "1 of 3 runs failed\n  exit code 3: runs/lr=1e-4\n" in printed.err
    assert "megarl compare runs/lr=1e-3 runs/lr=1e-5\n" in printed.out
    assert "megarl report runs/lr=1e-3 runs/lr=1e-5 --out runs/report.html" in printed.out
    assert "0.25 -> 0.25" in printed.out
    (here / "mended").touch()
    assert main(arguments) == 0
    printed = capfd.readouterr()
    assert "run 1 of 1: lr=1e-4 in runs/lr=1e-4\n" in printed.out
    assert "megarl compare runs/lr=1e-3 runs/lr=1e-4 runs/lr=1e-5\n" in printed.out
    assert main([*arguments, "--dry-run"]) == 0
    assert capfd.readouterr().out == ""
    assert main([*arguments, "--dry-run", "trainer.total_training_steps=7"]) == 0
    assert capfd.readouterr().out.count("megarl train ") == 3


def test_signal_reaches_run_and_ends_sweep(here: Path) -> None:
    (here / "program.py").write_text(WAITS)
    command = [sys.executable, "-c", SWEEP, "run.yaml", "--seeds", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for(lambda: Path("started").exists() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate()[0]
    assert process.returncode == EXIT_CODE
    assert Path("signals").read_text().split() == ["15"]
    assert "run 1 of 2" in printed and "run 2 of 2" not in printed
    assert "megarl: a signal stopped the sweep; continue it with\n" in printed


def test_ctrl_c_reaches_run_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "program.py").write_text(WAITS)
    inside = [
        "bash",
        "-c",
        f'cd {shlex.quote(str(here))} && exec "$@"',
        "bash",
        sys.executable,
        "-c",
        SWEEP,
        "run.yaml",
        "--seeds",
        "2",
    ]
    job = AtTerminal(inside, os.environ)
    wait_for(Path("started").exists)
    job.type(CTRL_C)
    assert job.end()[0] == EXIT_CODE
    assert Path("signals").read_text().split() == ["2"]
    process, group = Path("started").read_text().split()
    assert process == group  # else the terminal would send the signal too


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_run_ends_with_killed_sweep(here: Path) -> None:
    (here / "program.py").write_text(WAITS)
    with subprocess.Popen([sys.executable, "-c", SWEEP, "run.yaml", "--seeds", "2"]) as process:
        wait_for(lambda: Path("started").exists() or process.poll() is not None)
        process.kill()
    pid = Path("started").read_text().split()[0]
    wait_for(lambda: not Path("/proc", pid).exists())


def test_sweep_refuses_a_launcher(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run.yaml", "--seeds", "2"]) == 1
    assert "start megarl sweep without a launcher" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, EXIT_CODE])
def test_slurm_script_runs_its_combination(here: Path, capsys: Captured, code: int) -> None:
    assert main(["run.yaml", "--over", f"{LR}=1e-3,1e-4", "--slurm", "trainer.nnodes=2"]) == 0
    assert capsys.readouterr().out.startswith("submit       sbatch runs/sweep.sh\n")
    script = here / "runs" / "sweep.sh"
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --array=0-1", "#SBATCH --output=slurm-%A_%a.out", "#SBATCH --requeue"} <= set(options)
    for name, own in (("srun", code), ("scontrol", 0)):
        calls = shlex.quote(str(here / "calls"))
        (here / name).write_text(f'#!/bin/sh\necho "$(pwd) $(basename "$0") $*" >>{calls}\nexit {own}\n')
        (here / name).chmod(0o755)
    slurm = {"JOB_ID": "8", "ARRAY_JOB_ID": "7", "ARRAY_TASK_ID": "1", "JOB_NUM_NODES": "2", "NTASKS_PER_NODE": "8"}
    environ = {f"SLURM_{name}": value for name, value in slurm.items()} | {"PATH": f"{here}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", script], env=os.environ | environ, cwd="/", check=False)
    called = (here / "calls").read_text().splitlines()
    assert done.returncode == code
    own = f"{LR}=1e-4 trainer.default_local_dir=runs/lr=1e-4 trainer.experiment_name=base-lr=1e-4"
    assert called[0].startswith(f"{here} srun ")
    assert f"{sys.executable} -m megarl.commands.train run.yaml trainer.nnodes=2 {own} " in called[0]
    assert called[0].endswith(" trainer.nnodes=2 trainer.n_gpus_per_node=8")
    assert called[1:] == ([f"{here} scontrol requeue 7_1"] if code else [])


def test_slurm_script_holds_no_secret(here: Path, capsys: Captured) -> None:
    secret = "trainer.mlflow_tracking_uri=https://user:Swordf1sh@host"
    assert main(["run.yaml", "--seeds", "2", "--slurm", secret]) == 1
    assert "would show a secret of the command line" in capsys.readouterr().err
    assert not Path("runs").exists()
