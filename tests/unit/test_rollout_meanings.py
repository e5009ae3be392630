"""Arguments of vLLM that change samples, weights or ranks are refused, with the reason."""

from typing import Any

import pytest
from packaging.version import Version

from megarl.errors import UserError
from megarl.rollout.fields import OURS, engine_arguments, engine_faults
from megarl.rollout.meanings import ACCEPTED, OLDER, REFUSED, UNKNOWN
from megarl.rollout.release import NEWEST, OLDEST, check_release, installed_release

ALL_REFUSED = [name for names in REFUSED.values() for name in names]
THEIRS = {name for name in engine_arguments() if not name.startswith("_")}


def test_every_argument_of_the_installed_vllm_is_judged_once() -> None:
    assert sorted([*OURS, *ACCEPTED, *ALL_REFUSED]) == sorted({*OURS, *ACCEPTED, *ALL_REFUSED})
    assert sorted(THEIRS - OURS - ACCEPTED - {*ALL_REFUSED}) == []


def test_every_argument_that_is_judged_exists() -> None:
    release = Version(installed_release() or "0").release[:2]
    if release == NEWEST:
        assert sorted({*OURS, *ACCEPTED, *ALL_REFUSED} - THEIRS) == sorted(OLDER)
    if release == OLDEST:
        assert sorted(OLDER - THEIRS) == []
    assert {*ACCEPTED, *ALL_REFUSED} >= OLDER


@pytest.mark.parametrize("name", sorted({*ALL_REFUSED} & THEIRS))
def test_an_argument_that_is_not_proven_is_refused_with_its_reason(name: str) -> None:
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
        {"hf_token": "secret", "disable_log_stats": False, "cpu_offload_gb": 4},
    ],
)
def test_an_argument_that_changes_nothing_passes(arguments: dict[str, Any]) -> None:
    assert list(engine_faults(arguments)) == []


def test_an_argument_of_a_later_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.rollout.fields.engine_arguments", lambda: THEIRS | {"dream"})
    assert list(engine_faults({"dream": True})) == [f"dream {UNKNOWN}: remove it"]


@pytest.mark.parametrize("release", ["0.26.0", "0.32.0", "0.32.1+cpu", "0.27.1rc1"])
def test_a_tested_release_is_accepted(release: str) -> None:
    check_release(release)


@pytest.mark.parametrize("release", ["0.25.1", "0.33.0", "0.33.0rc1", "1.0", "0.1.dev1+gabc", "unknown", None])
def test_another_release_is_refused_before_anything_of_it_is_imported(release: str | None) -> None:
    with pytest.raises(UserError, match=r"vLLM .* 0\.26 to 0\.32"):
        check_release(release)


def test_the_installed_release_is_found_without_an_import() -> None:
    check_release(installed_release())
