"""The check of a GPU machine: its stages start when there is time for them, and its page is that of its results."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.cases import MODELS, Split
from benchmarks.gpu_page import page
from benchmarks.gpu_site import Site
from benchmarks.gpu_stages import SIZES, SYNCED, Stage, layout, small_config, stages, training_arguments
from benchmarks.workload import Algorithm
from megarl.config.load import load_config
from megarl.models.architecture import read_architecture
from megarl.models.families import FAMILIES
from scripts.gpu_check import PAGE, choose, published, read, run

STEP = {
    "timing_s/step": 9.0,
    "timing_s/sync_check": 1.0,
    "timing_s/gen": 3.0,
    "perf/mfu": 0.25,
    "perf/max_memory_allocated_gb": 70.0,
}


def test_docs_page_shows_published_results() -> None:
    results = published()
    [num_devices] = {result["num_devices"] for result in results.values()}
    assert PAGE.read_text() == page(results, num_devices=num_devices)
    assert "- Machine: " in PAGE.read_text()


def test_a_page_without_results_says_that_nothing_ran() -> None:
    shown = page({}, num_devices=1)
    assert "**Not run on a GPU yet.**" in shown


def test_step_is_shown_without_sync_check_beside_floor() -> None:
    found = {"steps": [STEP | {"timing_s/step": 99.0}, STEP], "traces": []}
    results = {
        "train-0.5b-ppo": {"done": True, "seconds": 50.0, "found": found},
        "resume": {"done": False, "seconds": 3.0, "error": "ValueError: it ended\nafter much else"},
    }
    lines = page(results, num_devices=1).splitlines()
    assert (
        f"On 1 GPU, 1 of {len(stages())} stages succeeded. Failed: resume. Not run as stages: doctor, tests-learner"
        in "\n".join(lines)
    )
    assert "| 0.5b | ppo | 4.2 | 8.4 | 8.0 | 1.90 | 25.0% | - | 70.0 |" in lines
    assert "| timing_s/gen | 3.00 |" in lines
    assert "| resume | failed | 3 | ValueError: it ended |" in lines


def site(out: Path, num_devices: int = 1) -> Site:
    return Site(out=out, num_devices=num_devices)


def stage(name: str, limit_s: int, calls: list[tuple[str, int]], *, fails: bool = False) -> Stage:
    def work(site: Site, stage: Stage) -> dict[str, Any]:
        calls.append((stage.name, stage.limit_s))
        if fails:
            raise ValueError("broken")
        return {"number": 1}

    return Stage(name=name, limit_s=limit_s, run=work)


def test_stage_runs_once_if_half_its_time_remains(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    short, long, bad = stage("doctor", 50, calls), stage("tests", 300, calls), stage("resume", 20, calls, fails=True)
    assert run(site(tmp_path), [short, long, bad], budget_s=100.5) == ["tests"]
    assert calls == [("doctor", 50), ("resume", 20)]
    results = read(tmp_path)
    assert results["doctor"]["done"] and results["doctor"]["found"] == {"number": 1}
    assert results["resume"]["error"] == "ValueError: broken"
    assert run(site(tmp_path), [short, long, bad], budget_s=200.5) == []
    assert calls[2:] == [("tests", 200), ("resume", 20)]  # what is left of the time is the limit


def test_stages_are_selected_by_name_prefix() -> None:
    assert [stage.name for stage in choose("resume,train-3b")] == ["train-3b-ppo", "train-3b-grpo", "resume"]
    assert [stage.name for stage in choose("verify-qwen2")] == ["verify-qwen2"]  # and not qwen2_moe
    with pytest.raises(SystemExit, match="no stage tests2; there are doctor"):
        choose("tests2")


def test_program_past_time_limit_dies_with_child_processes(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        f"import subprocess; p = subprocess.Popen(['sleep', '60']); open('{started}', 'w').write(str(p.pid)); p.wait()"
    )
    with pytest.raises(ValueError, match="it took longer than 2 s; the end of .*logs/doctor.txt"):
        site(tmp_path).program("doctor", "-c", code, limit_s=2)
    deadline = time.monotonic() + 30
    while is_alive(int(started.read_text())):  # a killed process ends a moment later
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ValueError, match="ended with code 7, not 0"):
        site(tmp_path).program("doctor", "-c", "exit(7)", limit_s=60)
    assert site(tmp_path).program("doctor", "-c", "print(3)", limit_s=60) == "3\n"  # of the last program alone


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("family", FAMILIES)
def test_there_is_a_small_model_of_every_family(family: str) -> None:
    assert read_architecture(small_config(family)).family == family
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**small_config(family)))


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_layouts_use_every_device(tmp_path: Path, num_devices: int) -> None:
    assert Split.read(layout(site(tmp_path, num_devices))).num_ranks == num_devices
    assert {size.model for size in SIZES.values()} | set(SYNCED.values()) <= MODELS.keys()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_rehearsed_training_has_samples_for_all_devices(
    size: Any, num_devices: int, algorithm: Algorithm, tmp_path: Path
) -> None:
    site = Site(out=tmp_path, num_devices=num_devices, device="cpu", rehearses=True)
    config = load_config(training_arguments(size, algorithm, site, tmp_path / "model"), world_size=num_devices)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n >= num_devices
