"""Seeds are a pure function of what is asked, and every declared end of a response is known."""

import json
from pathlib import Path

from megarl.rollout.sampling import request_seed, stop_token_ids


def test_a_seed_is_the_same_everywhere_and_for_ever() -> None:
    assert request_seed(1, step=2, prompt_index=3, sample=4) == 7597657864365363701


def test_every_part_of_a_request_changes_its_seed() -> None:
    seeds = {
        request_seed(seed, step=step, prompt_index=index, sample=sample)
        for seed in (0, 1)
        for step in range(-1, 4)
        for index in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 2 * 5 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_stop_tokens_are_those_of_the_generation_config_and_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_token_ids(tmp_path, 2) == [2, 7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 2]}))
    assert stop_token_ids(tmp_path, 2) == [2, 9]
    assert stop_token_ids(tmp_path, None) == [2, 9]


def test_a_generation_config_without_stop_tokens_leaves_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert stop_token_ids(tmp_path, None) == [7]
