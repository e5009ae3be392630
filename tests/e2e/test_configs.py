"""Every file in `configs/` parses, plans and runs two steps on a tiny model with the algorithm of the file.

New files are tested without a change here. The command line makes runs small: model, data, lengths, batches, ranks.
Runs are independent, so two run at once, each in a process that has imported everything.
"""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file

from megarl.commands import plan, sft, train, train_reward
from megarl.config.load import load_config, load_reward_train_config, load_sft_config
from megarl.config.root import Config
from megarl.data.parquet import write_rows
from megarl.tracking.jsonl import read_jsonl
from tests.support import tiny
from tests.support.forked import run_forked
from tests.support.programs import ROOT
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint, write_classifier
from tests.support.workspace import MAX_RESPONSE_LENGTH, NUM_TOKENS, Workspace

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ENVIRONMENTS = ROOT / "tests" / "support" / "own_environments.py"
PLANS = sorted((ROOT / "configs" / "plans").glob("*.yaml"))
SIDE_BY_SIDE = 2
RUN_S = 600
NUM_STEPS, NUM_PROMPTS = 2, 8
FEELINGS = [
    "happy",
    "sad",
    "love",
    "hate",
    "good",
    "bad",
    "smile",
    "cry",
    "great",
    "awful",
]  # a reward may look for them
STOP = [2, *range(NUM_TOKENS - 20, NUM_TOKENS)]  # some responses of a random model end before the limit, most do not

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SIZES: dict[str, dict[str, Any]] = {  # of models that files name by id, for the plan
    "Qwen/Qwen2.5-1.5B-Instruct": {
        **QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-3B": {
        **QWEN,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        **QWEN,
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
}
SMALL = {**tiny.SIZES, "model_type": "llama", "max_position_embeddings": 32768}  # of other models
JUDGE = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}

DISTINCTIVE: dict[str, Callable[[Config], bool]] = {  # metrics, and the configurations that have them
    "critic/vf_loss": lambda config: config.has_critic,
    "critic/vf_explained_var": lambda config: config.has_critic,
    "actor/kl_loss": lambda config: config.actor_rollout_ref.actor.use_kl_loss,
    "actor/reward_kl_penalty": lambda config: bool(
        config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.kl_coef
    ),
    "actor/ptx_loss": lambda config: config.actor_rollout_ref.actor.ptx_files is not None,
    "reward/model/mean": lambda config: config.reward_model.enable,
    "episode/turns/mean": lambda config: config.environment.name is not None,
    "critic/baselines/mean": lambda config: config.algorithm.adv_estimator == "remax",
    "train/num_gen_batches": lambda config: config.algorithm.filter_groups.enable,
    "rollout_corr/rollout_is_mean": lambda config: config.algorithm.rollout_correction.rollout_is is not None,
    "rollout_corr/rollout_rs_masked_fraction": lambda config: (
        config.algorithm.rollout_correction.rollout_rs is not None
    ),
}
ALWAYS = {
    "critic/score/mean",
    "critic/advantages/mean",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/grad_norm",
    "actor/entropy",
    "rollout_corr/kl",
    "response_length/clip_ratio",
}


SUPERVISED: dict[
    str, tuple[Any, Any, str]
] = {  # by the beginning or the end of the file's name: entry point, loader, metric
    "sft": (sft.main, load_sft_config, "sft/loss"),
    "reward": (train_reward.main, load_reward_train_config, "reward_model/loss"),
}


def supervision(path: Path) -> str | None:
    """Return the kind of supervised learning of a file; None for reinforcement learning."""
    if "actor_rollout_ref" in yaml.safe_load(path.read_text()):
        return None
    (kind,) = SUPERVISED.keys() & {*path.stem.split("_")}
    return kind


@pytest.mark.parametrize("path", [*CONFIGS, *PLANS], ids=lambda path: path.stem)
def test_fits_the_devices_it_asks_for(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind := supervision(path):
        _, load, _ = SUPERVISED[kind]
        assert load([str(path)], world_size=None, check_paths=False)
        return
    config = load_config([str(path)], world_size=None, check_paths=False)
    arguments = [str(path), "--json", *([] if config.trainer.device == "cpu" else ["--device=h100"])]
    if not (ROOT / config.actor_rollout_ref.model.path).is_dir():
        model = SIZES.get(config.actor_rollout_ref.model.path, SMALL)
        (tmp_path / "config.json").write_text(json.dumps(model))
        arguments.append(f"actor_rollout_ref.model.path={tmp_path}")
        arguments += [f"actor_rollout_ref.ref.model.path={tmp_path}"] if config.teachers else []
    if config.reward_model.enable:
        (tmp_path / "judge").mkdir()
        (tmp_path / "judge" / "config.json").write_text(json.dumps(SMALL | JUDGE))
        arguments.append(f"reward_model.model.path={tmp_path / 'judge'}")
    assert plan.main(arguments) == 0, capsys.readouterr()
    answer = json.loads(capsys.readouterr().out)
    assert answer["grid"]["num_ranks"] == config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert answer["fits"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write tiny models, a teacher and a judge, with a tokenizer that knows numbers, nonsense and feelings."""
    root = tmp_path_factory.mktemp("models")
    found = {
        "llama": write_checkpoint(root / "llama", "llama", eos_token_id=STOP),
        "qwen2": write_checkpoint(root / "qwen2", "qwen2", eos_token_id=STOP),
        "teacher": write_checkpoint(root / "teacher", "llama", seed=1),
        "judge": write_classifier(root / "judge", "llama"),
    }
    for directory in found.values():
        train_sentencepiece(
            directory / "tokenizer.model",
            vocab_size=NUM_TOKENS,
            normalization_rule_name="identity",
            user_defined_symbols=[f"\N{LOWER ONE EIGHTH BLOCK}{word}" for word in FEELINGS],
        )
    found["tokens of its own"] = train_sentencepiece(root / "own.model", vocab_size=NUM_TOKENS - 50)
    return found


@pytest.fixture(scope="module")
def pairs(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write prompts with responses to imitate, to prefer and to reject."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    prompts = pq.read_table(workspace.train)["prompt"].to_pylist()
    rows = [
        {"prompt": prompt, "response": prompt[:4], "chosen": prompt[:4], "rejected": prompt[4:8]} for prompt in prompts
    ]
    write_rows(path, rows)
    return path


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest,
    workspace: Workspace,
    models: dict[str, Path],
    pairs: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[Path, Future[tuple[Path, bool]]]]:
    """Run each selected file; return its run directory, and whether every weight of its model changed."""
    chosen: set[Any] = {
        item.callspec.params["path"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_two_steps.__name__
    }

    def run(path: Path, run_dir: Path) -> tuple[Path, bool]:
        kind = supervision(path)
        special = supervised_arguments(models, pairs) if kind else rl_arguments(path, workspace, models, pairs)
        arguments = [str(path), *special, *trainer_arguments(run_dir)]
        body = (follow, kind, arguments) if kind else (explore, arguments)
        return run_dir, run_forked(*body, log=run_dir / "printed.txt", timeout_s=RUN_S)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {path: pool.submit(run, path, tmp_path_factory.mktemp(path.stem)) for path in sorted(chosen)}
        pool.shutdown(cancel_futures=True)


def trainer_arguments(run_dir: Path) -> list[str]:
    return [
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=-1",
        "trainer.save_last=false",
        "trainer.save_best=false",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={run_dir}",
    ]


def supervised_arguments(models: dict[str, Path], pairs: Path) -> list[str]:
    return [
        f"data.train_files={pairs}",
        f"data.val_files={pairs}",
        f"data.train_batch_size={NUM_PROMPTS}",
        f"model.path={models['llama']}",
        "megatron.dtype=float32",
        "optim.lr_warmup_steps=0",
    ]


def rl_arguments(path: Path, workspace: Workspace, models: dict[str, Path], pairs: Path) -> list[str]:
    """Return arguments for one rank, small data and short responses; keep the number of mini-batches."""
    config = load_config([str(path)], world_size=None, check_paths=False)
    actor, length = config.actor_rollout_ref.actor, config.data.max_response_length
    model = models["qwen2" if "Qwen2" in config.actor_rollout_ref.model.path else "llama"]
    mini_batch_size = max(1, NUM_PROMPTS * actor.ppo_mini_batch_size // config.data.train_batch_size)
    arguments = [
        f"data.train_files={workspace.train}",
        f"data.val_files={workspace.val}",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.val_batch_size=null",
        "data.max_prompt_length=64",
        f"data.max_response_length={MAX_RESPONSE_LENGTH}",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini_batch_size}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.enforce_eager=true",
        "actor_rollout_ref.rollout.max_num_seqs=64",
        "actor_rollout_ref.rollout.max_num_batched_tokens=2048",
    ]
    if actor.ptx_files:
        arguments.append(f"actor_rollout_ref.actor.ptx_files={pairs}")
    if config.has_critic and "Qwen2" in config.actor_rollout_ref.model.path:  # a critic of another family and tokenizer
        arguments.append(f"critic.model.path={models['llama']}")
        arguments.append(f"critic.model.tokenizer_path={models['tokens of its own']}")
    if config.reward_model.enable:
        arguments.append(f"reward_model.model.path={models['judge']}")
    if config.teachers:
        arguments.append(f"actor_rollout_ref.ref.model.path={models['teacher']}")
    if config.trainer.critic_warmup:
        arguments.append("trainer.critic_warmup=1")
    if config.algorithm.overlong_buffer.enable:
        buffer = config.algorithm.overlong_buffer.len * MAX_RESPONSE_LENGTH // length
        arguments.append(f"algorithm.overlong_buffer.len={buffer}")
    if config.environment.name:
        arguments += [f"environment.path={ENVIRONMENTS}", "environment.name=Digits"]
    elif not config.custom_reward_function.path:
        arguments.append(f"custom_reward_function.path={workspace.reward}")
    return arguments


def follow(kind: str, arguments: list[str]) -> bool:
    """On the only rank: run supervised learning and return whether every exported weight changed."""
    main, load, _ = SUPERVISED[kind]
    main(arguments)
    config = load(arguments, world_size=1)
    before, after = (
        load_file(next(Path(directory).glob("*.safetensors")))
        for directory in (config.model.path, Path(config.trainer.default_local_dir) / "huggingface")
    )
    assert len(before.keys() & after.keys()) >= len(before) - 1  # a reward model has another head
    return not any(tensor.equal(before[name]) for name, tensor in after.items() if name in before)


def explore(arguments: list[str]) -> bool:
    """On the only rank: run `megarl train`; return whether each weight of the actor, or of its adapters, changed."""
    from megarl.assembly import run as build

    build_training, watched = build.build_training, {}

    def build_and_watch(*arguments: Any, **keywords: Any) -> Any:
        run = build_training(*arguments, **keywords)
        learner = run.job.actor.learner  # type: ignore[attr-defined]
        watched["weights"] = learner.adapters if learner.lora else learner.weights
        with watched["weights"]() as weights:
            watched["before"] = {name: tensor.clone() for name, tensor in weights.items()}
        return run

    build.build_training = build_and_watch  # the trainer looks the function up when it starts
    train.main(arguments)
    with watched["weights"]() as weights:
        return all(not tensor.equal(watched["before"][name]) for name, tensor in weights.items())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_two_steps(path: Path, runs: dict[Path, Future[tuple[Path, bool]]]) -> None:
    run_dir, all_weights_changed = runs[path].result()
    assert all_weights_changed
    lines = [line for line in read_jsonl(run_dir / "metrics.jsonl") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert all(math.isfinite(value) for value in line.values()), line
    if kind := supervision(path):
        assert all(SUPERVISED[kind][-1] in line for line in lines)
        return
    config, last = load_config([str(run_dir / "config.yaml")], world_size=1), lines[-1]
    assert last.keys() >= ALWAYS
    assert last.keys() & DISTINCTIVE.keys() == {name for name, has in DISTINCTIVE.items() if has(config)}
    assert last["training/rollout_probs_diff_max"] < 1e-4
    assert last["actor/grad_norm"] > 0.0
