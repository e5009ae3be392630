"""The stages of `scripts/gpu_check.py`, in order: each is a command of megarl, and a few numbers of its results."""

import importlib.util
import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_site import Site, last_object
from benchmarks.report import machine
from benchmarks.workload import Algorithm, Workload
from megarl.distributed.signals import EXIT_CODE
from megarl.models.families import FAMILIES
from megarl.platform.errors import UserError
from megarl.platform.versions import versions
from megarl.tracking.jsonl import read_jsonl

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TRAINED_STEPS = 3
RESUMED_STEPS = 4
VERIFIED_SEQUENCES = 16  # of the engine, which captures a graph for each number of them


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the check, and the most seconds that it may take."""

    name: str
    limit_s: int
    run: Callable[[Site, "Stage"], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model whose training is measured, and how a device of 140 GB holds actor, critic and reference of it."""

    model: str
    max_tokens: int  # of a micro-batch
    engine_share: float
    limit_s: int  # of a training
    settings: tuple[str, ...] = ()


SIZES: Mapping[str, Size] = {
    "0.5b": Size(model="qwen2.5-0.5b", max_tokens=32768, engine_share=0.4, limit_s=240),
    "1.5b": Size(model="qwen2.5-1.5b", max_tokens=16384, engine_share=0.3, limit_s=300),
    "3b": Size(
        model="qwen2.5-3b",
        max_tokens=4096,
        engine_share=0.2,
        limit_s=420,
        settings=(f"{ACTOR}.megatron.grad_offload=true",),
    ),
}
SYNCED = {"4b": "qwen3-4b", "8b": "qwen3-8b", "30b-a3b": "qwen3-30b-a3b"}
COMPARED = ("4b", "8b")  # with mbridge
TESTS: Mapping[str, str] = {  # pytest's -k, so that each part ends within a call of the default length
    "learner": "not rollout",
    "eager": "rollout and not False",
    "graphs": "rollout and False",
}
PROMPTS = 256
PROMPT_TOKENS = 256
RESPONSE_TOKENS = 1024
REHEARSED = "llama-1m"
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,  # the default of some families is beyond this vocabulary
}
SMALL_EXPERTS = {
    **{name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts")},
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
SMALL_LATENT = {
    "head_dim": 64,  # transformers takes it for the rotated part
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}
OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {"n_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_next": {"num_hidden_layers": 4, "shared_expert_intermediate_size": 128},
    "gpt_oss": {
        "rms_norm_eps": 1e-5,
        "sliding_window": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4, "shared_expert_intermediate_size": 128},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 32},
}


def stages() -> list[Stage]:
    """Return all stages, in order."""
    return [
        Stage(name="doctor", limit_s=120, run=doctor),
        *(Stage(name=f"tests-{name}", limit_s=470, run=partial(gpu_tests, chosen)) for name, chosen in TESTS.items()),
        Stage(name="quickstart", limit_s=240, run=quickstart),
        *(Stage(name=f"verify-{family}", limit_s=150, run=partial(verify, family)) for family in FAMILIES),
        *(
            Stage(name=f"train-{name}-{algorithm}", limit_s=size.limit_s, run=partial(train, size, algorithm))
            for name, size in SIZES.items()
            for algorithm in ("ppo", "grpo")
        ),
        *(Stage(name=f"phases-{name}", limit_s=240, run=partial(phases, model)) for name, model in SYNCED.items()),
        *(Stage(name=f"reshard-{name}", limit_s=240, run=partial(reshard, SYNCED[name])) for name in COMPARED),
        Stage(name="resume", limit_s=240, run=resume),
    ]


def doctor(site: Site, stage: Stage) -> dict[str, Any]:
    """Report what the machine has and lacks, and measure its peaks."""
    with site.started(stage.name, "-m", "megarl", "doctor") as running:
        shown = running.finish(limit_s=stage.limit_s, expected=None)
        is_ready = running.process.returncode == 0
    found = {
        "machine": machine(site.device),
        "versions": versions(),
        "ready": is_ready,
        "report": shown.splitlines(),
    }
    if not site.is_hollow:
        directory = site.work / "peaks"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "peers.json").write_text(json.dumps({"dtype": site.dtype}), encoding="utf-8")
        site.program(stage.name, "-m", "benchmarks.step_peers", "machine", directory, limit_s=stage.limit_s)
        found["peaks"] = json.loads((directory / "machine.json").read_text(encoding="utf-8"))
    return found


def gpu_tests(chosen: str, site: Site, stage: Stage) -> dict[str, Any]:
    """Run the chosen tests that need a GPU; a rehearsal skips each of them."""
    results = site.out / f"{stage.name}.xml"
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={results}", "-k", chosen]
    site.program(stage.name, "-m", "pytest", "tests/gpu", *options, limit_s=stage.limit_s)
    suite = ET.parse(results).getroot().find("testsuite")  # noqa: S314 - our own file
    if suite is None:
        raise UserError(f"{results} has no results")
    return {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}


def quickstart(site: Site, stage: Stage) -> dict[str, Any]:
    """Let a small model learn arithmetic."""
    out = site.work / "quickstart"
    sizes: tuple[object, ...] = ("--ppo-steps", 10)
    if site.rehearses:
        few = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.max_num_seqs=16")
        sizes = ("--num-problems", 32, "--sft-steps", 4, "--ppo-steps", 2, *few)
    command = ("scripts/quickstart.py", "--out", out, *sizes, "trainer.logger=[console,jsonl]", *split(site))
    site.program(stage.name, *command, limit_s=stage.limit_s)
    found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found


def verify(family: str, site: Site, stage: Stage) -> dict[str, Any]:
    """Compare trainer, engine and transformers for a small model of a family."""
    directory = site.work / family
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(small_config(family)), encoding="utf-8")
    settings = [f"{ACTOR}.megatron.dtype={site.dtype}", f"{ROLLOUT}.max_num_seqs={VERIFIED_SEQUENCES}", *split(site)]
    printed = site.program(stage.name, "-m", "megarl", "verify", directory, *settings, "--json", limit_s=stage.limit_s)
    report = last_object(printed)
    return {key: report[key] for key in ("ok", "max_abs_logprob_diff", "differences", "roundtrip_exact", "seconds")}


def split(site: Site) -> list[str]:
    """Return the settings that split trainer and engine over two devices, if there are several."""
    keys = (f"{ACTOR}.megatron.tensor_model_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size")
    return [f"{key}=2" for key in keys] if site.num_devices > 1 else []


def small_config(family: str) -> dict[str, Any]:
    """Return the `config.json` of a small model of a family."""
    config = SMALL | {"model_type": family}
    traits = FAMILIES[family]
    if traits.experts:
        config |= SMALL_EXPERTS
    if traits.latent:
        config |= SMALL_LATENT
    if traits.fused_qkv:
        config["num_key_value_heads"] = SMALL["num_attention_heads"]
    return {**config, **OF_FAMILY.get(family, {})}


def train(size: Size, algorithm: Algorithm, site: Site, stage: Stage) -> dict[str, Any]:
    """Train for a few steps, with a trace of the last."""
    directory = site.work / size.model
    run = site.work / stage.name
    shutil.rmtree(run, ignore_errors=True)
    arguments = [
        *training_arguments(size, algorithm, site, directory),
        f"trainer.total_training_steps={TRAINED_STEPS}",
        f"trainer.profile_steps=[{TRAINED_STEPS}]",
        "trainer.save_last=false",
        f"trainer.default_local_dir={run}",
    ]
    site.program(stage.name, "-m", "megarl", "train", *arguments, limit_s=stage.limit_s)
    traces = site.out / "traces" / stage.name
    shutil.copytree(run / "profile", traces, dirs_exist_ok=True)
    return {"steps": read_jsonl(run / "metrics.jsonl"), "traces": sorted(path.name for path in traces.iterdir())}


def training_arguments(size: Size, algorithm: Algorithm, site: Site, directory: Path) -> list[str]:
    """Write model, prompts and reward to `directory`; return the arguments that name them, and those of the size."""
    few = (max(4, site.num_devices), 16, 16)
    sizes = few if site.rehearses else (PROMPTS * site.num_devices, PROMPT_TOKENS, RESPONSE_TOKENS)
    num_prompts, prompt_tokens, response_tokens = sizes
    group = 1 if algorithm == "ppo" else 2 if site.rehearses else 8
    directory.mkdir(parents=True, exist_ok=True)
    workload = Workload(
        model=REHEARSED if site.rehearses else size.model,
        lengths="equal",
        algorithm=algorithm,
        num_prompts=num_prompts // group,
        num_responses=group,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
    )
    return [
        *workload.write(directory),
        *size.settings,
        f"{ACTOR}.ppo_max_token_len_per_gpu={size.max_tokens}",
        f"{ACTOR}.megatron.dtype={site.dtype}",
        f"{ROLLOUT}.dtype={site.dtype}",
        f"{ROLLOUT}.gpu_memory_utilization={size.engine_share}",
        f"{ROLLOUT}.enforce_eager={str(site.rehearses).lower()}",
        f"{ROLLOUT}.max_num_seqs={num_prompts // site.num_devices or 1}",
        f"trainer.n_gpus_per_node={site.num_devices}",
        f"trainer.device={site.device}",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
    ]


def layout(site: Site) -> str:
    """Return a trainer and an engine that are cut differently, if there are several devices."""
    return {1: "tp1-tp1", 2: "pp2-tp2", 4: "tp2pp2-tp2", 8: "tp4pp2-tp2"}[site.num_devices]


def phases(model: str, site: Site, stage: Stage) -> dict[str, Any]:
    """Time waking, syncing and sleeping."""
    options = ["--model", REHEARSED if site.rehearses else model, "--layout", layout(site), "--device", site.device]
    printed = site.program(stage.name, "-m", "benchmarks", "phases", *options, "--json", limit_s=stage.limit_s)
    found = last_object(printed)
    return {key: found[key] for key in ("case", "seconds", "bytes_in_use", "bytes_received_max")}


def reshard(model: str, site: Site, stage: Stage) -> dict[str, Any]:
    """Compare the sync with mbridge and with a copy, if mbridge is there."""
    if importlib.util.find_spec("mbridge") is None:
        return {"skipped": "mbridge is not installed"}
    model = REHEARSED if site.rehearses else model
    options = ["--model", model, "--layout", layout(site), "--device", site.device, "--repeats", 3]
    found = last_object(
        site.program(stage.name, "-m", "benchmarks", "reshard", *options, "--json", limit_s=stage.limit_s)
    )
    return dict(found["cases"][0])


def resume(site: Site, stage: Stage) -> dict[str, Any]:
    """End a run by a signal after a step, kill it in a later step, and let it resume both times."""
    size = SIZES["0.5b"]
    run = site.work / stage.name
    shutil.rmtree(run, ignore_errors=True)
    command = [
        *("-m", "megarl", "train", *training_arguments(size, "grpo", site, site.work / size.model)),
        *(f"trainer.total_training_steps={RESUMED_STEPS}", f"trainer.default_local_dir={run}", "trainer.save_freq=1"),
    ]

    def steps() -> list[int]:
        log = run / "metrics.jsonl"
        return [int(row["step"]) for row in read_jsonl(log)] if log.exists() else []

    with site.started(stage.name, *command) as running:
        running.wait_until(lambda: 1 in steps(), limit_s=stage.limit_s)
        running.process.terminate()
        running.finish(limit_s=stage.limit_s, expected=EXIT_CODE)
    stopped = steps()
    with site.started(stage.name, *command) as running:
        running.wait_until(lambda: len(steps()) > len(stopped), limit_s=stage.limit_s)  # the end of the block kills it
    killed = steps()
    site.program(stage.name, *command, limit_s=stage.limit_s)
    if steps() != list(range(1, RESUMED_STEPS + 1)):
        raise UserError(f"{run}/metrics.jsonl has the steps {steps()}")
    return {"stopped_after": stopped[-1], "killed_after": killed[-1], "steps": steps()}
