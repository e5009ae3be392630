"""Shards of many ranks become a checkpoint that transformers loads, bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.reshard.files import OF_MODEL, CheckpointFiles, export
from tests.support.layouts import blank, trainer_layouts

pytestmark = pytest.mark.ranks


def load_and_export(source, target, tp, pp, dtype, max_shard_bytes):
    rank = dist.get_rank()
    config = json.loads((source / "config.json").read_text())
    model = read_architecture(config)
    sources = trainer_layouts(model, tp=tp, pp=pp, dp=dist.get_world_size() // tp // pp)
    tensors = blank(sources[rank])
    CheckpointFiles(source).load(sources[rank], tensors, shapes=hf_shapes(model))
    export(
        target,
        hf_shapes(model),
        sources,
        tensors,
        config=config | {"dtype": str(dtype).removeprefix("torch.")},
        dtype=dtype,
        ranks_per_node=2,
        device=torch.device("cpu"),
        bucket_bytes=1 << 14,
        names=replace(OF_MODEL, max_shard_bytes=max_shard_bytes),
    )
    assert (target / "config.json").is_file()  # on return the checkpoint is complete for every rank


def write_checkpoint(directory, variant):
    from tests.support.tiny import (
        write_checkpoint,  # here, as below: the ranks need no transformers, which is slow to import
    )

    return write_checkpoint(directory, variant)


def parameters(directory):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    return model.state_dict(), model.config


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "qwen2", "qwen3", "qwen3-tied", "gpt_oss", "ernie4_5_moe"])
def test_transformers_loads_what_it_once_saved(variant, pool, tmp_path):
    source = write_checkpoint(tmp_path / "source", variant)
    original, config = parameters(source)
    for world, tp, pp, dtype, max_shard_bytes in (
        (4, 2, 2, torch.float32, 140_000),
        (2, 2, 1, torch.bfloat16, 1 << 30),
    ):
        target = tmp_path / "target"  # the second export replaces the first, shards and index included
        pool.run(world, load_and_export, source, target, tp, pp, dtype, max_shard_bytes)
        exported, exported_config = parameters(target)
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name].to(dtype)) for name in original)
        assert exported_config.dtype == dtype
        assert exported_config.tie_word_embeddings == config.tie_word_embeddings
        files = sorted(target.glob("*.safetensors"))
        names = [name for file in files for name in load_file(file)]
        assert sorted(names) == sorted(hf_shapes(read_architecture(config.to_dict())))
        if dtype == torch.float32:
            assert len(files) >= 3
            assert all(file.stat().st_size <= max_shard_bytes + 4096 for file in files)
        else:
            assert [file.name for file in files] == ["model.safetensors"]
            assert not (target / "model.safetensors.index.json").exists()
        assert not list(target.glob(".*"))


def export_incomplete(target):
    model = read_architecture(json.loads((target / "source" / "config.json").read_text()))
    sources = [[piece for piece in layout if "norm" not in piece.name] for layout in trainer_layouts(model, tp=2, pp=1)]
    with pytest.raises(ValueError, match="cannot reshard model.layers.0.input_layernorm.weight"):
        export(
            target / "target",
            hf_shapes(model),
            sources,
            {},
            config={},
            dtype=torch.float32,
            ranks_per_node=2,
            device=torch.device("cpu"),
        )


def test_missing_parameter_is_named_before_export_writes_anything(pool, tmp_path):
    write_checkpoint(tmp_path / "source", "llama")
    pool.run(2, export_incomplete, tmp_path)
    assert not (tmp_path / "target").exists()
