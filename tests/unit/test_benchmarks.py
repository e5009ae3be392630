"""The cases of the benchmarks, and the summaries of their numbers."""

import re
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks import PROGRAM, scaling, step_page, step_plan, step_trl
from benchmarks.cases import MODELS, Split
from benchmarks.options import PARSERS, scaling_parser, step_parser
from benchmarks.peer_trl import Clock, arguments
from benchmarks.report import summary
from benchmarks.step import compare
from benchmarks.workload import Lengths, Workload
from megarl.models.architecture import hf_shapes, read_architecture
from megarl.planning import engine_cost


@pytest.mark.parametrize(
    ("layout", "numbers"),
    [
        ("tp2-tp2", (2, 1, 2, 2)),
        ("tp1pp2-tp2", (1, 2, 2, 2)),
        ("tp2-tp1", (2, 1, 2, 1)),
        ("dp2-dp2", (1, 1, 2, 1)),
        ("tp2pp2-tp2", (2, 2, 4, 2)),
    ],
)
def test_a_layout_says_how_both_sides_are_cut(layout: str, numbers: tuple[int, ...]) -> None:
    split = Split.read(layout)
    assert (split.tp, split.pp, split.num_ranks, split.engine_tp) == numbers


@pytest.mark.parametrize("layout", ["tp2", "tp2-", "tp2-tp4", "tp2-pp2", "2-2", "tp2-tp2-tp2"])
def test_what_is_no_layout_is_refused(layout: str) -> None:
    with pytest.raises(ValueError, match=f"--layout {layout}: "):
        Split.read(layout)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("llama-100m", 100.7), ("qwen3-moe-100m", 97.0), ("qwen2.5-0.5b", 494.0), ("qwen2.5-1.5b", 1543.7)),
        *(("qwen2.5-3b", 3085.9), ("qwen3-4b", 4022.5), ("qwen3-8b", 8190.7), ("qwen3-30b-a3b", 30532.1)),
    ],
)
def test_models_are_as_large_as_they_are_called(name: str, millions: float) -> None:
    shapes = hf_shapes(read_architecture(MODELS[name]))
    assert sum(map(prod, shapes.values())) / 1e6 == pytest.approx(millions, rel=1e-3)


def test_unknown_model_is_refused_immediately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama-100m", str(tmp_path)):
        assert step_parser().parse_known_args(["--model", name])[0].model == name
    for name, remedy in (("llama-3x", "did you mean llama-3m?"), ("/zzz", "name a directory, or one of ")):
        with pytest.raises(SystemExit):
            step_parser().parse_known_args(["--model", name])
        assert f"'{name}' is neither a directory nor a known shape: {remedy}" in capsys.readouterr().err


def test_case_takes_slowest_rank_and_median_repeat() -> None:
    def rank(mine: list[float], received: int) -> dict[str, Any]:
        seconds = {"megarl": mine, "mbridge": [10.0, 10.0, 10.0], "copy": [0.5], "repack": [0.5], "exchange": [0.25]}
        ways = {"megarl": received, "mbridge": 40}
        return {
            "seconds": seconds,
            "bytes_received": ways,
            "bytes_lower_bound": received,
            "peak_extra_bytes": ways,
            "engine_bytes": 7,
            "mean_probability_difference": 0.0,
        }

    ranks = [rank([1.0, 2.0, 9.0], 4), rank([2.0, 1.0, 1.0], 8)]
    found = summary({"case": {"model": "m"}, "ranks": ranks})
    assert found["seconds"] == {"megarl": 2.0, "mbridge": 10.0, "copy": 0.5, "repack": 0.5, "exchange": 0.25}
    assert (found["times_faster"], found["times_copy_and_repack"], found["times_all_three"]) == (5.0, 2.0, 1.6)
    assert found["bytes_received_max"] == {"megarl": 8, "mbridge": 40}
    assert found["bytes_received_mean"] == {"megarl": 6, "mbridge": 40}
    assert found["peak_ratio"] == 0.2
    uncounted = [one | {"peak_extra_bytes": {"megarl": None, "mbridge": None}} for one in ranks]
    found = summary({"case": {}, "ranks": uncounted})
    assert found["peak_extra_bytes"] is found["peak_ratio"] is None


def test_throughputs_are_compared_over_all_steps() -> None:
    workload = Workload(model="llama-1m", lengths="long-tail", algorithm="grpo", num_prompts=3, num_responses=4)
    steps, others = (
        [{"timing_s/step": seconds, "timing_s/gen": seconds - 0.5} for seconds in each]
        for each in ([1.0, 3.0, 2.0], [1.0, 7.0])
    )
    assert compare(steps, others, workload) == {
        "mean_samples_per_second": 6.0,
        "samples_per_second_against": 3.0,
        "times_faster": 2.0,
        "generation_times_faster": 3.5 / 1.5,
    }


def test_a_model_of_another_process_is_kept(tmp_path: Path) -> None:
    workload = Workload(model="llama-1m", lengths="equal", algorithm="grpo", num_prompts=2, num_responses=2)
    model = workload.model_in(tmp_path)
    for _ in range(2):  # two processes that find no model
        workload._write_model(model)
    assert (model / "config.json").is_file() and (model / "tokenizer").is_dir()
    assert [path.name for path in model.parent.iterdir()] == [model.name]


GRPO = Workload(model="llama-1m", lengths="equal", algorithm="grpo", num_prompts=32, num_responses=4)


def test_trl_is_compared_per_token_in_each_phase() -> None:
    def step(tokens: int, **seconds: float) -> dict[str, float]:
        return {f"timing_s/{phase}": value for phase, value in seconds.items()} | {"perf/total_num_tokens": tokens}

    ours = [step(100, gen=2.0, sync=0.5, sync_check=0.5, ref=1.0, old_log_prob=1.0, update_actor=2.0, step=8.0)]
    theirs = [step(50, gen=seconds, sync=1.0, ref=2.0, update=3.0, step=4.0 * seconds) for seconds in (3.0, 1.0, 2.0)]
    found = step_trl.beside(ours, theirs, num_samples=16)
    assert found["seconds"]["gen"] == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert found["times_faster"] == {"gen": 2.0, "sync": 2.0, "ref": 4.0, "update": 2.0, "step": 2.0}
    assert (found["samples_per_second"], found["tokens_per_second"], found["tokens"]) == (2.0, 6.25, 50)


def test_trl_update_time_excludes_input_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = Clock(), iter([0.0, 1.0, 2.0, 5.0, 6.0, 10.0])
    monkeypatch.setattr("benchmarks.peer_trl.time.perf_counter", lambda: next(now))
    clock.begin()
    assert clock.timed("prepare", clock.timed("gen", lambda seed: seed))(7) == 7
    assert clock.end() == {"gen": 3.0, "update": 5.0, "step": 10.0}


@pytest.mark.parametrize(("lengths", "rows"), [("equal", 128), ("ragged", 32), ("long-tail", 8)])
def test_trl_micro_batches_fill_token_budget(lengths: Lengths, rows: int) -> None:
    workload = Workload(model="llama-1m", lengths=lengths, algorithm="grpo", num_prompts=32, num_responses=4)
    found = arguments(workload.settings(Path()) | {"dtype": "float32", "output": "out"})
    assert (found["per_device_train_batch_size"], found["gradient_accumulation_steps"]) == (rows, 128 // rows)
    assert found["generation_kwargs"] == {"ignore_eos": lengths == "equal"}


@pytest.mark.parametrize(
    ("algorithm", "override", "message"),
    [
        ("ppo", "trainer.deterministic=true", "--peer trl --algorithm ppo: TRL has no such trainer"),
        ("grpo", "data.max_response_length=9", "data.max_response_length=9: --peer trl would do other work"),
        ("grpo", "trainer.deterministic=true", "python is missing; run `make setup-peers` in "),
    ],
)
def test_work_that_trl_cannot_do_is_refused(
    algorithm: Any, override: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(step_trl, "PYTHON", tmp_path / "python")
    workload = Workload(model="llama-1m", lengths="equal", algorithm=algorithm, num_prompts=2, num_responses=2)
    with pytest.raises(ValueError, match=message):
        step_trl.check(workload, [override])


def test_peer_runs_requested_number_of_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(
        """#!/bin/bash
echo '{"trl": "1.0"}'
read count
for number in $(seq $count); do echo "{\\"seconds\\": {\\"step\\": $number}, \\"tokens\\": 8}"; done
read count
exit 3
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(step_trl, "PYTHON", program)
    with step_trl.Trl(GRPO, tmp_path, dtype="float32") as trl:
        assert trl.versions == {"trl": "1.0"}
        assert trl.steps(2) == [{"timing_s/step": number, "perf/total_num_tokens": 8} for number in (1, 2)]
        with pytest.raises(ValueError, match="TRL ended with exit code 3; its messages are above"):
            trl.steps(1)


def test_engine_step_cost_is_solved_from_two_engines() -> None:
    def seconds(num_layers: int, num_samples: int) -> float:
        return 0.008 + 0.0003 * num_layers + 0.0002 * num_samples

    shallow, deep = ([seconds(layers, samples) for samples in engine_cost.SAMPLES] for layers in engine_cost.LAYERS)
    found = engine_cost.from_seconds(shallow, deep)
    assert (found.step, found.layer, found.sample) == pytest.approx((0.008, 0.0003, 0.0002))


def test_a_plan_is_compared_with_the_median_step() -> None:
    steps = [{"timing_s/step": seconds, "timing_s/gen": 2.0} for seconds in (3.0, 4.0, 9.0)]
    found = step_plan.beside({"gen": 1.0, "step": 5.0}, steps)
    assert found == {
        "gen": {"planned": 1.0, "measured": 2.0, "ratio": 0.5},
        "step": {"planned": 5.0, "measured": 4.0, "ratio": 1.25},
    }


def test_runs_become_the_tables_of_the_page() -> None:
    phases = {"step": 4.0, "gen": 2.0, "ref": 0.5, "update_actor": 1.0}
    run: dict[str, Any] = {
        "command": "python -m benchmarks step",
        "machine": {"cores": 2},
        "versions": {"torch": "2"},
        "workload": {"model": "llama-1m", "algorithm": "grpo", "lengths": "equal", "ranks": 1},
        "seconds": {phase: {"median": seconds} for phase, seconds in phases.items()},
        "tokens_per_second": 1000.0,
        "ratios": {"generation": 0.9, "infer": 0.8, "update": 1.1, "other_share": 0.03},
        "plan": {"step": {"planned": 5.0, "measured": 4.0, "ratio": 1.25}},
    }
    page = step_page.markdown([run, run | {"trl": {"seconds": {"gen": {"median": 3.0}}, "times_faster": {"gen": 1.5}}}])
    assert "| llama-1m, grpo, equal, 1 rank | 4.00 | 2.00 | 0.50 | 1.00 | 1,000 | 0.90 | 0.80 | 1.10 | 3.0% |" in page
    assert "| llama-1m, grpo, equal, 1 rank | 0.125 | 0.250 |" in page
    assert "| llama-1m, grpo, equal, 1 rank | step | 5.00 | 4.00 | 1.25 |" in page
    assert page.count("| llama-1m, grpo, equal, 1 rank | gen | 3.00 | 1.50x |") == 1
    assert page.count("- Command: `python -m benchmarks step`") == 1


def test_scaling_varies_one_size_and_plots_it(tmp_path: Path) -> None:
    options = scaling_parser().parse_args(["--ranks", "1,2", "--prompts", "8,16", "--response-tokens", "32"])
    points = scaling.points(options)
    assert [(point.ranks, point.prompts, point.response_tokens) for point in points] == [
        (1, 8, 32),
        (2, 8, 32),
        (1, 16, 32),
    ]
    found = [asdict(point) | {"tokens_per_second": 100.0 * (1 + number)} for number, point in enumerate(points)]
    scaling.draw(found, tmp_path / "scaling.svg")
    assert (tmp_path / "scaling.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,-2"])
def test_what_is_no_list_of_sizes_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scaling_parser().parse_args(["--ranks", text])
    assert "is not numbers such as 1,2,4" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_usage_and_example(name: str) -> None:
    shown = PARSERS[name][1]().format_help()
    assert f"Usage: {PROGRAM} {name} " in shown
    assert re.search(rf"Example:\n *{PROGRAM} {name} ", shown)
    assert "default: None" not in shown
