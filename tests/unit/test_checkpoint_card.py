"""The model card: its front matter is what the hub reads, its numbers are those of the exported step."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.checkpoint.card import card, loading, serving, training
from megarl.checkpoint.contents import Contents
from megarl.checkpoint.state import State
from megarl.data.origins import as_note
from megarl.data.parquet import write_rows
from megarl.models.lora import Lora

RL = {
    "data": {"train_files": ["a.parquet", "b.parquet"], "val_files": "c.parquet"},
    "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-3B"}},
    "algorithm": {"adv_estimator": "grpo"},
    "custom_reward_function": {"path": "mine.py"},
}
HISTORY = [
    {"step": 0, "val/test_score/mine": 0.1},
    {"step": 2, "critic/score/mean": 0.25, "val/test_score/mine": 0.5},
    {"step": 3, "critic/score/mean": 0.75},
]


def contents(config: dict[str, Any] | None) -> Contents:
    parts = {"code": None, "inputs": None, "versions": {"torch": "2.13"}, "models": None, "run_ids": {}}
    return Contents(state=State(step=2), config=config, **parts)


def test_the_card_of_a_policy(tmp_path: Path) -> None:
    text = card(contents(RL), HISTORY, tmp_path / "actor", scores=False)
    front, body = text.split("---\n")[1:3]
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["megarl", "reinforcement-learning"],
        "base_model": "Qwen/Qwen2.5-3B",
    }
    assert (
        "Trained from `Qwen/Qwen2.5-3B` for 2 steps. "
        "Reinforcement learning (`adv_estimator: grpo`); the reward is that of `mine.py`."
    ) in body
    assert "| validation, mine | 0.1 | 0.5 |" in body
    assert "| critic/score/mean | 0.25 | 0.25 |" in body  # step 3 is later
    assert "| data.train_files | `a.parquet`, `b.parquet` |" in body
    assert "| torch | 2.13 |" in body
    assert yaml.safe_load(body.split("```yaml\n")[1].split("```")[0]) == RL


def test_local_model_is_not_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    config = {"model": {"path": "runs/model"}}
    assert "base_model" not in card(contents(config), [], tmp_path, scores=False)
    assert "an unknown model" in card(contents(None), [], tmp_path, scores=False)


def test_the_way_of_training_is_named() -> None:
    assert training({"model": {}}) == "Supervised fine-tuning."
    assert training({"center_rewards_coefficient": 0.0}) == "It is a reward model."
    judged = RL | {"custom_reward_function": {"path": None}, "reward_model": {"enable": True}}
    assert training(judged).endswith("the reward is that of a reward model.")
    for environment in ({"name": "guess"}, {"path": "guess.py", "name": "Guess"}):
        assert training(RL | {"environment": environment}).rsplit("`")[-2] in ("guess", "guess.py")


def test_the_lines_that_load_it_are_python(tmp_path: Path) -> None:
    for scores in (False, True):
        compile(loading(tmp_path, scores=scores), "card", "exec")
    assert "vllm" not in loading(tmp_path, scores=True)


def front_of(config: dict[str, Any], place: Path | str = "out", **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card(contents(config), [], place, scores=False, **options).split("---\n")[1])
    return found


def test_base_of_revision_is_named_by_id() -> None:
    base = "hf://ann/base@v1"
    assert front_of({"model": {"path": base}})["base_model"] == "ann/base"
    adapters = Lora(rank=4, alpha=8, base=base)
    lines = loading("ann/mine", scores=False, adapters=adapters)
    assert 'AutoModelForCausalLM.from_pretrained("ann/base", revision="v1")' in lines
    assert serving(Path("out"), adapters).startswith("vllm serve ann/base --revision v1 --enable-lora")


def test_published_card_names_id_not_directory() -> None:
    text = card(contents(RL), [], "ann/mine", scores=False)
    assert "# mine\n" in text
    assert 'from_pretrained("ann/mine")' in text and 'LLM("ann/mine")' in text


def test_datasets_are_hub_ids_of_training_files(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1 ="}]
    write_rows(tmp_path / "noted.parquet", rows, as_note(["openai/gsm8k", "ann/sums"]))
    write_rows(tmp_path / "own.parquet", rows)
    (tmp_path / "own.jsonl").write_text("{}")
    files = [str(tmp_path / name) for name in ("noted.parquet", "own.parquet", "own.jsonl", "gone.parquet")]
    hub = ["hf://datasets/ann/sums@v1/train.parquet", "hf://datasets/bob/more/x/y.jsonl", "hf://buckets/bob/b/y.jsonl"]
    config = {"data": {"train_files": [*files, *hub, "s3://bucket/a/b.parquet"]}}
    assert front_of(config)["datasets"] == ["openai/gsm8k", "ann/sums", "bob/more"]
    assert "datasets" not in front_of({"data": {"train_files": files[1]}})


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ("license: mit\ntags: [a]", {"license": "mit"}),
        ("license: other\nlicense_name: mine\nlicense_link: https://x.org/L", {"license_link": "https://x.org/L"}),
        ("license: other\nlicense_name: mine\nlicense_link: LICENSE", {"license": "other", "license_name": "mine"}),
        ("license: [mit, apache-2.0]", {}),
        ("tags: [a]", {}),
        ("license: {", {}),
    ],
)
def test_licence_is_that_of_local_base(known: str, expected: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{known}\n---\n# a model\n")
    found = front_of({"model": {"path": str(tmp_path)}})
    assert expected.items() <= found.items()
    assert ("license" in found) == ("license" in known and bool(expected))
    assert ("license_link" in found) == ("://" in known)
    named = front_of({"model": {"path": str(tmp_path)}}, license_id="gpl-3.0")
    assert named["license"] == "gpl-3.0" and "license_name" not in named


def test_licence_of_hub_base_is_in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--ann--base"
    (snapshot := repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = front_of({"model": {"path": "ann/base"}})
    assert (found["license"], found["license_name"]) == ("other", "mine")
    assert found["license_link"].endswith("/ann/base/resolve/main/LICENSE")
    assert "license" not in front_of({"model": {"path": "ann/unknown"}})
