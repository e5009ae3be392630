"""The quickstart from the first stage to the last, with a few steps of each."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.programs import run_python

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_every_stage_leaves_what_it_promises(tmp_path: Path) -> None:
    printed = run_python("scripts/quickstart.py", "--out", tmp_path, "--sft-steps", 4, "--ppo-steps", 2, timeout_s=280)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() == {"val_score_first", "val_score_last", "steps", "seconds", "rollout_probs_diff_max"}
    assert summary["steps"] == 2
    assert summary["rollout_probs_diff_max"] < 1e-3
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "mlflow ui --backend-store-uri sqlite:///" in printed
    assert "megarl new mine --tiny" in printed
    model, tokenizer = (kind.from_pretrained(tmp_path / "actor") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("1 2 3 = 6 :", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
