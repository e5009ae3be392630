"""`megarl plan` as a user calls it: exit codes, the table, and the one JSON object."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from megarl.commands.cli.kinds import amount, engine_milliseconds, link_microseconds, mean_lengths
from megarl.commands.plan import main
from megarl.planning.device import GPUS, H100, Device, choose_device
from megarl.tracking.config import TrainerSection
from tests.support.hollow import write_hollow

EXAMPLE = "configs/plans/llama-3-70b_64gpu.yaml"  # relative to the root of the repository, the directory of pytest
SMALL = (EXAMPLE, "trainer.nnodes=1", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1")
LLAMA_8B = "actor_rollout_ref.model.path=configs/models/llama-3-8b"


def test_json_is_one_object_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, LLAMA_8B, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert not plan["shortfalls"]
    assert plan["gpu_memory_bytes"] == 80 * 10**9
    assert plan["grid"]["num_ranks"] == 8
    assert {moment["phase"] for moment in plan["memory"]["moments"]} == {"sync", "generate", "infer", "update"}
    assert plan["memory"]["reward_host_bytes"] == 8 * 4 * 8 * 10**9  # ranks x processes x max_memory_gb
    for moment in plan["memory"]["moments"]:
        assert moment["total"] == sum(moment["parts"].values())
    # Tensor 8 on both sides: only rows of the vocabulary travel, which Megatron pads to 8 x 64 and the engine to 64.
    assert plan["sync"]["received_max"] == 2 * 7 * 32 * 4096 * 2


def test_the_time_follows_from_lengths_and_speeds(capsys: pytest.CaptureFixture[str]) -> None:
    def time(*options: str) -> dict:
        main([*SMALL, LLAMA_8B, "--json", *options])
        return json.loads(capsys.readouterr().out)["time"]

    most, short = time(), time("--lengths", "256,512")
    assert most["lengths"] == {"prompt": 1024, "response": 3072, "longest": None}
    assert short["flops"] < most["flops"] and short["total"] < most["total"]
    fast = time("--lengths", "256,512", "--peak-tflops", "2250", "--memory-bandwidth", "8TB/s")
    assert fast["total"] < short["total"] and fast["flops"] == short["flops"]
    host = time("--lengths", "256,512,1024", "--engine-ms", "9,0.25,0.1")["seconds"]["gen"]
    assert host > time("--lengths", "256,512,1024")["seconds"]["gen"] + 1024 * (0.009 + 32 * 0.00025)
    assert fast["peaks"] == {"flops_per_second": 2250e12, "bytes_per_second": 8e12, "narrow_flops": {}}
    narrow, constant = time("--peak-tflops", "989.4,8192:800,16384:900"), time("--peak-tflops", "800")
    assert narrow["peaks"]["narrow_flops"] == {"8192": 800e12, "16384": 900e12}
    assert narrow["seconds"]["infer reference"] == pytest.approx(constant["seconds"]["infer reference"])


@pytest.mark.parametrize(
    ("wanted", "trainer", "expected"),
    [
        ("h200", TrainerSection(device="cpu"), GPUS["h200"]),
        ("auto", TrainerSection(n_gpus_per_node=8), H100),
        ("auto", TrainerSection(n_gpus_per_node=1, nnodes=2), H100),
        ("auto", TrainerSection(n_gpus_per_node=1, device="cuda"), H100),
    ],
)
def test_the_device_that_a_plan_assumes(wanted: str, trainer: TrainerSection, expected: Device) -> None:
    assert choose_device(wanted, trainer, "bfloat16") == expected


def test_ranks_share_the_cpu_of_this_machine() -> None:
    found = choose_device("auto", TrainerSection(n_gpus_per_node=2, device="cpu"), "float32")
    assert found.name == "this machine's CPU"
    assert found.num_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    assert 1e9 < found.peaks.flops_per_second < 1e14


def test_a_plan_of_hours_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--peak-tflops", "1", "trainer.total_training_steps=100", "--lengths", "256,512")
    main([*SMALL, LLAMA_8B, *slow])
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"a step takes at least \d+\.\d hours on an H100, and the 100 steps \d+ days: a smaller", shown)
    main([*SMALL, LLAMA_8B])
    assert "a smaller model" not in capsys.readouterr().out


@pytest.mark.parametrize("typed", ["fast", "989.4,500", "989.4,x:500", "0", "989.4,256:0"])
def test_unreadable_peak_speed_is_fault_of_its_option(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, LLAMA_8B, "--peak-tflops", typed])
    assert ended.value.code == 2
    assert "TFLOPS[,WIDTH:TFLOPS...]" in capsys.readouterr().err


def test_run_beyond_memory_exits_with_1_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, LLAMA_8B, "--gpu-memory", "8GB"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "GB short: the device of a rank of stage 0 is too small while the" in shown
    assert "GB missing" in shown or "is enough" in shown


def test_2048_ranks_with_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs/plans/deepseek-v3_2048gpu.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["grid"]["num_ranks"] == 2048
    assert plan["sync"]["ratio"] == pytest.approx(30.6, abs=0.1)
    assert all(option["sync"] is None for option in plan["options"])  # an engine of 16 ranks has no room for the model


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        (
            ["actor_rollout_ref.rollout.gpu_memory_utilization=0.3"],
            "the KV cache: a replica draws 304 of its 1,024 samples",
        ),
        (["actor_rollout_ref.rollout.max_num_seqs=16"], "rollout.max_num_seqs=16: a replica has 1,024 samples"),
        (["--lengths", "256,512", "--latency-us", "500,500"], "the size of a replica: sums between its ranks take"),
    ],
)
def test_bound_of_generation_is_noted(options: list[str], bound: str, capsys: pytest.CaptureFixture[str]) -> None:
    def notes(*arguments: str) -> str:
        main([*SMALL, LLAMA_8B, *arguments])
        return " ".join(capsys.readouterr().out.split())

    assert "note: generation is bound" not in notes("--lengths", "256,512")
    assert f"note: generation is bound by {bound}" in notes(*options)


def test_domain_of_fast_links_may_span_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    def sync(*options: str) -> dict:
        main([EXAMPLE, "--json", *options])
        return json.loads(capsys.readouterr().out)["sync"]

    nodes, rack = sync(), sync("--nvlink-domain", "64")
    assert nodes["between_max"] > 0 and rack["between_max"] == 0
    assert rack["received_max"] == nodes["received_max"] == rack["inside_max"]
    assert rack["seconds"] < nodes["seconds"]


def test_a_reward_model_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    classifier = "reward_model.model.override_config={architectures: [LlamaForSequenceClassification], num_labels: 1}"
    model = ("reward_model.enable=true", "reward_model.model.path=configs/models/llama-3-8b", classifier)
    assert main([*SMALL, LLAMA_8B, *model, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    states = plan["memory"]["states"]
    # Equal in family and split, except for the output layer.
    assert states["reward model"]["weights"] == states["reference"]["weights"] - 2 * (128_512 // 8 - 1) * 4096
    assert "reward model" in {moment["worker"] for moment in plan["memory"]["moments"]}
    assert "reward model micro-batches" in {row["stage"] for row in plan["batch"]}


def test_faults_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([EXAMPLE, "trainer.nnodes=3"]) == 2
    assert "does not divide" in capsys.readouterr().err
    assert main([*SMALL, "actor_rollout_ref.model.path=configs"]) == 1
    assert "configs has no config.json" in capsys.readouterr().err


def test_missing_hub_model_is_reported_before_torch_import() -> None:
    absent = "actor_rollout_ref.model.path=org/absent"
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megarl", "plan", *SMALL, absent],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 2
    imports = [line for line in shown.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in shown.stderr.splitlines() if line not in imports]
    assert "org/absent is no local directory" in "\n".join(said)
    assert not any("Warning" in line for line in said)
    assert not any(line.endswith(" torch") for line in imports)


def test_damaged_weights_are_a_fault_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hollow(tmp_path, json.loads(Path("configs/models/llama-3-8b/config.json").read_text()))
    arguments = [*SMALL, f"actor_rollout_ref.model.path={tmp_path}"]
    assert main(arguments) == 0
    os.truncate(tmp_path / "model.safetensors", 100)
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert f"actor_rollout_ref.model.path: {tmp_path}/model.safetensors cannot be read as safetensors" in shown


def test_amounts_have_units() -> None:
    assert amount("80GB") == 80 * 10**9
    assert amount("79.5 GiB") == int(79.5 * 2**30)
    assert amount("45GB/s") == 45 * 10**9
    for none in ("0GB", "1.2.3GB", ".GB"):
        with pytest.raises(click.BadParameter, match="is not a number with one of the units"):
            amount(none)
    assert engine_milliseconds("1.2e-05,1.5e+03,0") == (1.2e-05, 1500.0, 0.0)
    with pytest.raises(click.BadParameter, match="units"):
        amount("80")


@pytest.mark.parametrize("faulty", ["256", "0,5", "a,b", "²,5", "1,2,3,4"])
def test_lengths_are_two_or_three_numbers(faulty: str) -> None:
    assert mean_lengths("256,1024,4096") == (256, 1024, 4096)
    with pytest.raises(click.BadParameter, match=f"'{faulty}' is not PROMPT,RESPONSE"):
        mean_lengths(faulty)


@pytest.mark.parametrize("faulty", ["9", "9,0.2", "a,b,c", "9,-1,0"])
def test_engine_step_cost_is_three_numbers(faulty: str) -> None:
    assert engine_milliseconds("9,0.25,0.5") == (9.0, 0.25, 0.5)
    with pytest.raises(click.BadParameter, match=f"'{faulty}' is not STEP,LAYER,SAMPLE"):
        engine_milliseconds(faulty)


@pytest.mark.parametrize("faulty", ["2", "2,15,3", "a,b", "-2,15"])
def test_latency_of_links_is_two_numbers(faulty: str) -> None:
    assert link_microseconds("2,15.5") == (2.0, 15.5)
    with pytest.raises(click.BadParameter, match=f"'{faulty}' is not INSIDE,BETWEEN"):
        link_microseconds(faulty)
