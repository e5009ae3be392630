"""The trial of a reward before a run, in real processes: faults are said with their rows, honest zeros pass."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_sft_config
from megarl.config.trial import _rows, find_models, find_sources, require_a_batch, try_out, try_reward
from megarl.rewards.config import RulesSection
from tests.support.places import without_places

MINIMAL = ("actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")
ROWS = [
    {"prompt": f"{number}+1=", "data_source": "own", "reward_model": {"ground_truth": str(number + 1)}}
    for number in range(12)
]
REWARD = """
def compute_score(solution_str, ground_truth, **_):
    {body}
    return 0.0
"""


@pytest.fixture
def tried(tmp_path: Path) -> Any:
    """A function that tries a reward, given its body, on twelve rows, and returns the remarks."""

    def attempt(body: str, *arguments: str) -> list[str]:
        data, reward = tmp_path / "rows.jsonl", tmp_path / "reward.py"
        data.write_text("\n".join(map(json.dumps, ROWS)))
        reward.write_text(REWARD.format(body=body))
        own = [f"data.train_files={data}", f"custom_reward_function.path={reward}"]
        own.append("reward_model.num_workers=1")  # rows in their order
        return list(try_reward(load_config([*MINIMAL, *own, *arguments], world_size=None, check_paths=False)))

    return attempt


def test_model_missing_from_hub_faults_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rl = load_config([*MINIMAL, "data.train_files=a.parquet"], world_size=None, check_paths=False)
    sft = load_sft_config(["model.path=org/start", "data.train_files=a.parquet"], world_size=None, check_paths=False)
    for config, key, model in ((rl, "actor_rollout_ref.model.path", "org/policy"), (sft, "model.path", "org/start")):
        with pytest.raises(ConfigError, match=f"{key}: {model} is no local directory") as error:
            find_models(config)
        assert "download it on another machine and name its directory" in said_by(error)
    elsewhere = replace(sft, model=replace(sft.model, path="s3://models/start"))
    find_models(elsewhere)  # is looked for with the weights
    with pytest.raises(ConfigError, match=r"data.tokenizer: org/reader is no local directory"):
        find_models(replace(elsewhere, data=replace(elsewhere.data, tokenizer="org/reader")))


def test_prompts_that_continue_need_their_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    keys = ("rollout.partial.enable=true", "rollout.n=8", "actor.ppo_mini_batch_size=1")
    own = [f"actor_rollout_ref.{key}" for key in keys]
    own += ["algorithm.rollout_correction.rollout_is=token", f"data.train_files={tmp_path / 'rows.jsonl'}"]
    few, many = (
        load_config([*MINIMAL, *own, f"data.train_batch_size={size}"], world_size=None, check_paths=False)
        for size in (9, 10)
    )
    require_a_batch(few)
    with pytest.raises(ConfigError, match="data.train_batch_size: 13 rows a step, but data.train_files has 12"):
        require_a_batch(many)


def test_optimizer_step_needs_its_supervised_pairs(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    own = [f"{key}={tmp_path / 'rows.jsonl'}" for key in ("data.train_files", "actor_rollout_ref.actor.ptx_files")]
    own += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    own += ["actor_rollout_ref.actor.ptx_coef=1.0"]
    few, many = (
        load_config(
            [*MINIMAL, *own, f"actor_rollout_ref.actor.ptx_batch_size={size}"], world_size=None, check_paths=False
        )
        for size in (12, 13)
    )
    require_a_batch(few)
    with pytest.raises(ConfigError, match=r"ptx_batch_size: 13 pairs an optimizer step, but .*ptx_files has 12: lower"):
        require_a_batch(many)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("actor_rollout_ref.ref.model.path=org/teacher", "actor_rollout_ref.ref.model.path: org/teacher is no local"),
        (
            "actor_rollout_ref.ref.teachers={math: org/teacher}",
            "actor_rollout_ref.ref.teachers: org/teacher is no local",
        ),
        ("critic.model.tokenizer_path=/nowhere", "critic.model.tokenizer_path: no such file or directory: /nowhere"),
        ("data.tokenizer=reader.model", "data.tokenizer: no such file: reader.model"),
    ],
)
def test_missing_teacher_and_tokenizer_fault_their_own_keys(
    argument: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    remote = [f"{key.partition('=')[0]}=s3://models/start" for key in MINIMAL]  # is looked for with the weights
    reads = ["actor_rollout_ref.actor.use_kl_loss=true", "data.train_files=a.parquet"]
    with pytest.raises(ConfigError) as error:
        find_models(load_config([*remote, *reads, argument], world_size=None, check_paths=False))
    assert f"  {said}" in said_by(error)


def test_teacher_for_absent_data_source_is_fault(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": "1", "data_source": source}) for source in ("math", "code", None)))

    def look(teachers: str, *arguments: str) -> None:
        named = [f"actor_rollout_ref.ref.teachers={teachers}", f"data.train_files={data}", *arguments]
        find_sources(load_config([*MINIMAL, *named], world_size=None, check_paths=False))

    reads = "actor_rollout_ref.actor.use_kl_loss=true"
    look("{math: org/one, default: org/two}", reads)
    with pytest.raises(
        ConfigError, match=r"ref\.teachers: no row .* 'mahts'; the files have code, default, math"
    ) as error:
        look("{math: org/one, mahts: org/two}", reads)
    assert "'math'" not in said_by(error)


def said_by(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return str(error.value)


def test_reward_trial_uses_ten_rows_and_allows_zeros(tried: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tried(f"open({str(log)!r}, 'a').write(f'{{solution_str}} {{ground_truth}}\\n')") == []
    assert sorted(map(str.split, log.read_text().splitlines()), key=lambda pair: int(pair[0])) == [
        [str(number), str(number)] for number in range(1, 11)
    ]
    assert tried("pass", "reward_model.trial_rows=99") == []


def test_rows_of_every_file_are_tried(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for file, number in zip(files, (20, 1, 20), strict=True):
        file.write_text("\n".join(map(json.dumps, (ROWS * 2)[:number])))
    (tmp_path / "own.py").write_text(REWARD.format(body="raise KeyError('answer')"))
    own = [f"custom_reward_function.path={tmp_path}/own.py", "reward_model.trial_rows=5"]
    names = ",".join(map(str, files))
    config = load_config([*MINIMAL, f"data.train_files=[{names}]", *own], world_size=None, check_paths=False)
    rows = [row.place for row in _rows(config, RulesSection(trial_rows=5), takes_ids=False)]
    assert rows == [f"{files[0]}, line 1", f"{files[0]}, line 2", f"{files[1]}, line 1"] + [
        f"{files[2]}, line {number}" for number in (1, 2)
    ]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("raise KeyError('answer')", "KeyError: 'answer'"),
        ("print(solution_str); raise KeyError('answer')", "; it printed '1'"),
        ("return 'good'", "TypeError: a reward returns a finite number or a dict with such a 'score', not 'good'"),
        ("return float('nan')", "not nan"),
        ("return {'score': 1.0, 'acc': None}", "TypeError: 'acc' is a finite number as the score is, not None"),
        ("import time; time.sleep(1000)", "it took longer than reward_model.timeout_s=0.5"),
    ],
)
def test_failing_reward_is_configuration_fault(body: str, detail: str, tried: Any) -> None:
    with pytest.raises(ConfigError) as error:
        tried(body, "reward_model.timeout_s=0.5" if "sleep" in body else "reward_model.timeout_s=100")
    assert "custom_reward_function: " in said_by(error)
    (said,) = error.value.faults
    assert re.search(r"rows\.jsonl, line 1 and [0-9] more: the reward fails if the response is '1': ", said.message)
    assert detail in said_by(error)
    assert "reward_model.trial_rows=0 starts without this trial" in said_by(error)


def test_failures_count_as_in_a_step(tried: Any) -> None:
    on_one = "if solution_str == '3': raise KeyError('answer')"
    (remark,) = tried(on_one)
    expected = "rows.jsonl, line 3: the reward fails if the response is '3': KeyError: 'answer'"
    assert without_places(remark).endswith(expected)
    with pytest.raises(ConfigError) as error:
        tried(on_one, "reward_model.on_failure=stop")
    assert "line 3" in said_by(error)
    on_most = "if len(solution_str) == 1 and solution_str > '2': raise KeyError('answer')"
    (remark,) = tried(on_most, "reward_model.on_failure=score")
    assert " and 6 more: the reward fails if the response is '3': " in remark
    with pytest.raises(ConfigError):
        tried(on_most)
    with pytest.raises(ConfigError):
        tried("raise KeyError('answer')", "reward_model.on_failure=score")


def test_reward_trial_is_skipped_if_disabled_or_unneeded(tried: Any) -> None:
    assert tried("raise KeyError('answer')", "reward_model.trial_rows=0") == []
    model = ["reward_model.enable=true", "reward_model.model.path=org/rm", "data.train_files=nothere.parquet"]
    assert list(try_reward(load_config([*MINIMAL, *model], world_size=None, check_paths=False))) == []


def test_unloadable_reward_file_is_configuration_fault(tried: Any) -> None:
    with pytest.raises(ConfigError, match="reward.py fails to load: IndentationError"):
        tried("    'too far'\n  return")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("Absent", r"environment\.name: .*own\.py has no class Absent"), ("Hasty", r"Hasty\.reset\(row\): too many")],
)
def test_unfit_environment_is_configuration_fault(name: str, fault: str, tmp_path: Path) -> None:
    own, data = tmp_path / "own.py", tmp_path / "rows.jsonl"
    own.write_text("class Hasty:\n    def reset(self): ...\n    def step(self, response): ...\n")
    data.write_text("\n".join(map(json.dumps, ROWS)))
    keys = [f"data.train_files={data}", f"environment.path={own}", f"environment.name={name}"]
    models = [f"{key}={tmp_path}" for key in ("actor_rollout_ref.model.path", "critic.model.path")]
    sizes = ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    config = load_config([*models, *keys, *sizes], world_size=None, check_paths=False)
    with pytest.raises(ConfigError, match=fault) as error:
        list(try_out(config))
    assert "environment: " not in said_by(error)


def test_built_in_rules_are_tried_too(tmp_path: Path) -> None:
    def attempt(data_source: str) -> list[str]:
        data = tmp_path / "rows.jsonl"
        data.write_text("\n".join(json.dumps(row | {"data_source": data_source}) for row in ROWS))
        config = load_config([*MINIMAL, f"data.train_files={data}"], world_size=None, check_paths=False)
        return list(try_reward(config))

    assert attempt("multiply") == []
    with pytest.raises(ConfigError, match="reward_model: .*line 1 and .*': no built-in reward for .* 'sudoku'"):
        attempt("sudoku")
