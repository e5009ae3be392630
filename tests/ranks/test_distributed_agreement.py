"""If ranks have different configurations, all of them stop with the differences."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

RUN = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=org/policy", "critic.model.path=org/critic")


def believe(facts_of_ranks: list[dict[str, Any]]) -> str:
    from megarl.distributed.agreement import agree

    try:
        agree(facts_of_ranks[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return "agreed"


def test_ranks_that_were_started_alike(pool: RankPool) -> None:
    assert pool.run(3, believe, [{"a.b": 1, "c": [1.5, None]}] * 3) == ["agreed"] * 3


def test_what_differs_is_named_on_every_rank(pool: RankPool) -> None:
    facts = [{"lr": 0.1, "n": 2, "torch": "2.13"}, {"lr": 0.1, "n": 4}, {"lr": 0.1, "n": 2, "torch": "2.13"}]
    said = pool.run(3, believe, facts)
    assert said[0] == said[1] == said[2]
    assert said[0].splitlines()[1:] == [
        "  n: 2 on ranks 0, 2, 4 on rank 1",
        "  torch: '2.13' on ranks 0, 2, nothing on rank 1",
    ]


def test_differing_secret_is_named_but_not_shown(pool: RankPool) -> None:
    facts = [{"uri": f"http://ann:Swordf1sh{rank}@host", "engine.hf_token": f"Swordf1sh{rank}"} for rank in range(3)]
    said = pool.run(3, believe, facts)[0]
    assert "uri: 'http://***@host' on rank 0" in said and "engine.hf_token: *** on rank 0" in said
    assert "Swordf1sh" not in said


def name_code_of(disks: Path) -> str:
    from megarl.assembly.records import name_custom_code
    from megarl.config.load import load_config

    arguments = [*RUN, "custom_reward_function.path=/proc/self/cwd/reward.py"]  # another file on every disk
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ValueError, match="started differently") as refused:
        monkeypatch.chdir(disks / str(dist.get_rank() % 2))
        name_custom_code(load_config(arguments, world_size=None, check_paths=False))
    return str(refused.value)


def test_ranks_with_another_reward_are_named(pool: RankPool, tmp_path: Path) -> None:
    digests = []
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
        (reward := tmp_path / name / "reward.py").write_text(f"def compute_score(**_): return {name}\n")
        digests.append(hashlib.sha256(reward.read_bytes()).hexdigest()[:12])
    what = "custom_reward_function.path: 'compute_score of /proc/self/cwd/reward.py (SHA-256: "
    for said in pool.run(3, name_code_of, tmp_path):
        assert f"{what}{digests[0]})' on ranks 0, 2" in said and f"{digests[1]})' on rank 1" in said


def test_a_long_list_is_cut(pool: RankPool) -> None:
    facts = [{f"key{number:02}": rank for number in range(25)} for rank in range(3)]
    lines = pool.run(3, believe, facts)[0].splitlines()
    assert len(lines) == 12
    assert lines[-1] == "  and 15 more"
