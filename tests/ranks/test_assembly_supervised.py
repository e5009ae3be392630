"""A run that learns from files resumes from its checkpoint as if it had not stopped, and exports its model."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megarl.data.parquet import write_rows
from megarl.tracking.jsonl import read_jsonl
from tests.support.outcomes import metrics_of
from tests.support.ranks import RankPool
from tests.support.s3 import Objects, s3_server
from tests.support.sentencepieces import train_sentencepiece
from tests.support.supervised import here, train
from tests.support.tiny import write_checkpoint


def refused(argv: list[str]) -> str:
    with pytest.raises(ValueError, match="models") as error:
        train(argv)
    return str(error.value)


def export(checkpoint: Path, out: Path) -> None:
    from megarl.commands.export import read_arguments, write

    launch = here()
    write(read_arguments([str(checkpoint), str(out)], world_size=launch.world_size), launch)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def arguments(root: Path, **trainer: object) -> list[str]:
    """A reward model over a pipeline of two, four steps long."""
    if not (model := root / "model").exists():
        train_sentencepiece(write_checkpoint(model, "llama") / "tokenizer.model", vocab_size=200)
        rows = [{"prompt": f"{i} =", "chosen": f" {i} + 0", "rejected": f" {i} * 0"} for i in range(12)]
        write_rows(root / "pairs.parquet", rows)
    return [
        f"data.train_files={root / 'pairs.parquet'}",
        "data.train_batch_size=4",
        "data.max_length=32",
        f"model.path={model}",
        "megatron={dtype: float32, pipeline_model_parallel_size: 2}",
        "optim.lr=1e-3",
        f"trainer.default_local_dir={root / 'run'}",
        "trainer.total_training_steps=4",
        "trainer.n_gpus_per_node=2",
        "trainer.logger=[jsonl]",
        *(f"trainer.{key}={value}" for key, value in trainer.items()),
    ]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_reward_model_resumes_and_is_exported(pool: RankPool, tmp_path: Path) -> None:
    argv, run_dir = arguments(tmp_path, save_freq=2), tmp_path / "run"
    pool.run(2, train, [*argv, "trainer.async_save=true", "trainer.save_huggingface=true"])
    expected = weights(run_dir / "huggingface")
    assert_equal(weights(run_dir / "global_step_4" / "huggingface"), expected)
    shutil.rmtree(run_dir / "global_step_4")
    shutil.rmtree(run_dir / "huggingface")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("2")
    pool.run(2, train, argv)
    pool.run(2, export, run_dir, tmp_path / "exported")  # cut by tensor parallelism
    for directory in (run_dir / "huggingface", tmp_path / "exported"):
        assert_equal(weights(directory), expected)
    assert not torch.equal(expected["score.weight"], torch.zeros_like(expected["score.weight"]))

    checkpoint = run_dir / "global_step_4"
    assert yaml.safe_load((checkpoint / "config.yaml").read_text())["optim"]["lr"] == 1e-3
    assert json.loads((checkpoint / "versions.json").read_text())["torch"] == torch.__version__

    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))  # it died when it had saved, and had not recorded
    exported = (run_dir / "huggingface" / "model.safetensors").stat().st_mtime_ns
    pool.run(2, train, argv)  # there is nothing left to do
    recorded = read_jsonl(run_dir / "metrics.jsonl")
    assert [line["step"] for line in recorded] == [1, 2, 3, 4]
    assert recorded[-1]["reward_model/loss"] == json.loads(lines[-1])["reward_model/loss"]
    assert (run_dir / "huggingface" / "model.safetensors").stat().st_mtime_ns == exported
    (run_dir / "huggingface" / "config.json").unlink()  # it died while it exported
    pool.run(2, train, argv)
    assert_equal(weights(run_dir / "huggingface"), expected)
    assert (run_dir / "huggingface" / "config.json").is_file()

    other = write_checkpoint(tmp_path / "other", "llama", vocab_size=300)
    shutil.copy(tmp_path / "model" / "tokenizer.model", other)
    (refusal,) = {*pool.run(2, refused, [*argv, f"model.path={other}", "trainer.total_training_steps=5"])}
    assert f"{checkpoint} was saved by a run of other models" in refusal
    assert "model.path: vocab_size is 211 in the checkpoint and 300 here" in refusal


def train_at(environ: dict[str, str], argv: list[str]) -> None:
    os.environ |= environ
    train(argv)


def learnt(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step without those of the mirror."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith("checkpoint/")}
        for step, metrics in metrics_of(run_dir).items()
    }


def test_run_with_lost_disk_resumes_from_mirror(pool: RankPool, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = arguments(tmp_path, save_freq=1, max_ckpt_to_keep=2, default_hdfs_dir="s3://mirror/of/run")
    with s3_server("mirror") as environ:
        pool.run(2, train_at, environ, argv)
        kept = ["global_step_3", "global_step_4", "latest_checkpointed_iteration.txt", "metrics.jsonl"]
        remote = Objects("mirror/of/run", environ)
        assert remote.names() == kept
        assert remote.sizes("global_step_4") == {
            str(path.relative_to(run_dir / "global_step_4")): path.stat().st_size
            for path in (run_dir / "global_step_4").rglob("*")
            if path.is_file()
        }
        expected, before = weights(run_dir / "huggingface"), learnt(run_dir)
        shutil.rmtree(run_dir)
        remote.delete("global_step_4/manifest.json")  # the last one was not whole yet
        pool.run(2, train_at, environ, argv)
        assert remote.names() == kept
        remote.delete("global_step_4/manifest.json")
        pool.run(2, train_at, environ, argv)  # nothing is left to do but to complete the mirror
        assert "manifest.json" in remote.sizes("global_step_4")
    assert_equal(weights(run_dir / "huggingface"), expected)
    assert learnt(run_dir) == before
    assert list(before) == [1, 2, 3, 4]
