"""A model of a hub on this machine learns from data of the hub, and is published there with its card."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load

from tests.support.hub_server import hub_server
from tests.support.programs import PYTHON, TORCHRUN, succeed
from tests.support.sentencepieces import train_sentencepiece
from tests.support.tiny import write_checkpoint


def test_model_comes_from_hub_and_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, run, out = tmp_path / "base", tmp_path / "run", tmp_path / "out"
    train_sentencepiece(write_checkpoint(base, "llama") / "tokenizer.model", vocab_size=200)
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    rows = [{"prompt": f"{number} =", "response": f" {number}"} for number in range(8)]
    keys = (
        *("data.train_files=hf://datasets/ann/sums/train.jsonl", "data.train_batch_size=4", "data.max_length=32"),
        *("model.path=hf://ann/base@v1", "megatron.dtype=float32", f"trainer.default_local_dir={run}"),
        *("trainer.total_training_steps=1", "trainer.n_gpus_per_node=1", "trainer.logger=[jsonl]"),
    )
    with hub_server(monkeypatch, tmp_path / "home") as hub:
        hub.add("models/ann/base", {path.name: path.read_bytes() for path in base.iterdir()}, "v1")
        hub.add("datasets/ann/sums", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
        succeed(*PYTHON, "megarl", "sft", *keys, timeout_s=300)
        printed = succeed(*PYTHON, "megarl", "export", run, out, "--push-to", "ann/mine", "--private", timeout_s=300)
        published = hub.repositories["models/ann/mine"]
        split = (run, tmp_path / "split", "--push-to", "ann/split")
        printed += succeed(*TORCHRUN, "megarl.commands.export", *split, timeout_s=300)
        published_by_two = hub.repositories["models/ann/split"]
    assert f"uploaded to {hub.address}/ann/mine" in printed
    assert published.private
    assert published.files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert load(published.files["model.safetensors"])
    assert sum("ann/split/commit" in one for one in hub.asked) == 1 and printed.count("uploaded to") == 2
    assert published_by_two.files["model.safetensors"] == published.files["model.safetensors"]
    card = published.files["README.md"].decode()
    assert 'from_pretrained("ann/mine")' in card and str(out) not in card
    front: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    assert (front["base_model"], front["license"], front["datasets"]) == ("ann/base", "mit", ["ann/sums"])
