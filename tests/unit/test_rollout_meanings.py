"""Arguments of vLLM that change samples, weights or ranks are refused, with the reason."""

import ast
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from megarl.models.families import FAMILIES
from megarl.platform.errors import UserError
from megarl.rollout.arguments import llm_arguments
from megarl.rollout.config import RolloutSection
from megarl.rollout.fields import OURS, _declared, engine_arguments, engine_faults
from megarl.rollout.meanings import ACCEPTED, OLDER, REFUSED, UNKNOWN
from megarl.rollout.release import (
    LATER,
    LATER_ON_CPU,
    NEWEST,
    OLDEST,
    check_family,
    check_release,
    installed_release,
)

ALL_REFUSED = [name for names in REFUSED.values() for name in names]
ADDED = {"monokernel", "sleep_mode_backend", "watchdog_config"}
"""Arguments that only the newest tested release has."""
THEIRS = {name for name in engine_arguments() if not name.startswith("_")}


def test_every_vllm_argument_is_classified_once() -> None:
    assert sorted([*OURS, *ACCEPTED, *ALL_REFUSED]) == sorted({*OURS, *ACCEPTED, *ALL_REFUSED})
    assert sorted(THEIRS - OURS - ACCEPTED - {*ALL_REFUSED}) == []


def test_every_argument_that_is_judged_exists() -> None:
    release = Version(installed_release() or "0").release[:2]
    if release != OLDEST:
        absent = OLDER if release == NEWEST else OLDER | ADDED
        assert sorted({*OURS, *ACCEPTED, *ALL_REFUSED} - THEIRS) == sorted(absent)
    else:
        assert sorted(OLDER - THEIRS) == []
    assert {*ACCEPTED, *ALL_REFUSED} >= OLDER


@pytest.mark.parametrize("name", sorted({*ALL_REFUSED} & THEIRS))
def test_unproven_argument_is_refused_with_reason(name: str) -> None:
    [fault] = engine_faults({name: "something"})
    reason = next(reason for reason, names in REFUSED.items() if name in names)
    assert fault == f"{name} {reason}: remove it"
    assert list(engine_faults({name: None})) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "what is drawn"),
        ({"quantization": "fp8"}, "the engine's weights"),
        ({"enable_lora": True}, "the engine's weights"),
        ({"hf_overrides": {"logit_scale": 2}}, "follows from other keys"),
        ({"data_parallel_size": 2}, "the ranks of the engine"),
        ({"pipeline_parallel_size": 2}, "the ranks of the engine"),
        ({"enable_return_routed_experts": True}, "what megarl does not read"),
        ({"kv_cache_dtype": "fp8"}, "what is drawn"),
        ({"kv_offloading_size": 10}, "cached keys of earlier weights"),
        ({"stream_interval": 2}, "order of requests"),
        ({"worker_extension_cls": "os.system"}, "runs code in the engine"),
        ({"hf_config_path": "org/other"}, "another description of the model"),
        ({"config_format": "mistral"}, "another description of the model"),
        ({"cpu_offload_gb": 4}, "moves the engine's weights"),
        ({"cpu_offload_gb": False}, "moves the engine's weights"),
        ({"offload_group_size": 2}, "moves the engine's weights"),
        ({"quantization": ""}, "the engine's weights"),
        ({"speculative_config": {}}, "what is drawn"),
        ({"kv_cache_dtype": False}, "what is drawn"),
        ({"data_parallel_size": False}, "the ranks of the engine"),
        ({"data_parallel_size": True}, "the ranks of the engine"),
    ],
)
def test_an_argument_is_judged_by_what_it_does(arguments: dict[str, Any], words: str) -> None:
    [fault] = engine_faults(arguments)
    assert fault.startswith(next(iter(arguments))) and words in fault


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_lora": False, "data_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto"},
        {"attention_backend": "CPU_MLA", "moe_backend": "triton", "block_size": 16, "num_gpu_blocks_override": 2},
        {"enable_expert_parallel": True, "compilation_config": {"cudagraph_capture_sizes": [8]}},
        {"hf_token": "secret", "disable_log_stats": False, "cpu_offload_gb": 0},
    ],
)
def test_an_argument_that_changes_nothing_passes(arguments: dict[str, Any]) -> None:
    assert list(engine_faults(arguments)) == []


@pytest.mark.parametrize("value", [False, True, "", [], {}, 0, 0.0, "banana"])
def test_only_a_value_that_vllm_takes_is_neutral(value: Any) -> None:
    defaults = {"cpu_offload_gb": (0,), "offload_group_size": (0,)}
    switches = {"bool": (False,), "bool | None": (False,)}
    for name in sorted({*ALL_REFUSED} & THEIRS):
        neutral = defaults.get(name, ()) or switches.get(ast.unparse(_declared()[name]), ())
        passes = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
        assert bool(list(engine_faults({name: value}))) != passes, name


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_size": "banana"},
        {"block_size": True},
        {"block_size": 16.5},
        {"num_gpu_blocks_override": [2]},
        {"cudagraph_capture_sizes": 8},
        {"cudagraph_capture_sizes": ["a"]},
        {"disable_log_stats": "false"},
        {"use_fp64_gumbel": 1},
        {"jit_monitor_mode": "banana"},
        {"additional_config": []},
        {"download_dir": 3},
    ],
)
def test_a_value_of_another_type_is_a_fault(arguments: dict[str, Any]) -> None:
    [(name, value)] = arguments.items()
    if name not in THEIRS:
        pytest.skip(f"this release has no {name}")
    [fault] = engine_faults(arguments)
    assert fault == f"{name} takes {ast.unparse(_declared()[name])}, not {type(value).__name__}: correct its value"


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_size": 16, "use_fp64_gumbel": True, "jit_monitor_mode": "warn", "download_dir": "/d"},
        {"cudagraph_capture_sizes": [1, 2], "offload_params": ["a"], "additional_config": {"a": 1}},
        {"kv_cache_metrics_sample": 1, "compilation_config": 3, "served_model_name": ["a"], "hf_token": True},
    ],
)
def test_a_value_of_the_declared_type_passes(arguments: dict[str, Any]) -> None:
    assert list(engine_faults({name: value for name, value in arguments.items() if name in THEIRS})) == []


def test_none_is_not_passed_on() -> None:
    section = RolloutSection(engine_kwargs={"data_parallel_size": None, "block_size": 16})
    passed = llm_arguments(section, model_dir=Path("m"), max_model_len=64, trust_remote_code=False, on_cpu=True)
    assert "data_parallel_size" not in passed
    assert passed["block_size"] == 16


def test_an_argument_of_a_later_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.fields.engine_arguments", lambda: THEIRS | {"dream"})
    assert list(engine_faults({"dream": True})) == [f"dream {UNKNOWN}: remove it"]


@pytest.mark.parametrize("release", ["0.26.0", "0.33.0", "0.32.1+cpu", "0.27.1rc1"])
def test_a_tested_release_is_accepted(release: str) -> None:
    check_release(release)


@pytest.mark.parametrize("release", ["0.25.1", "0.34.0", "0.34.0rc1", "1.0", "0.1.dev1+gabc", "unknown", None])
def test_unsupported_release_is_refused_before_import(release: str | None) -> None:
    with pytest.raises(UserError, match=r"vLLM .* 0\.26 to 0\.33"):
        check_release(release)


@pytest.mark.parametrize(("family", "everywhere"), [("llama", None), ("ministral3", True), ("gpt_oss", False)])
def test_old_release_refuses_families_of_later_ones(family: str, everywhere: bool | None) -> None:
    for release, on_cpu in (("0.26.1", True), ("0.31.0", False), ("0.32.0", True), ("0.33.0", False)):
        if everywhere is None or release > "0.32" or not (on_cpu or everywhere):
            check_family(family, release, on_cpu=on_cpu)
            continue
        with pytest.raises(UserError, match=f"^vLLM {release} does not compute {family} .*: install 0.32 or newer$"):
            check_family(family, release, on_cpu=on_cpu)


def test_families_of_later_releases_are_families() -> None:
    assert FAMILIES.keys() >= LATER | LATER_ON_CPU


def test_the_installed_release_is_found_without_an_import() -> None:
    check_release(installed_release())
