"""Reading checkpoints that transformers wrote, and errors for checkpoints that do not match."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.platform.files import replacing
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.layout import Box, Piece, row_major, whole
from tests.support.layouts import blank, filled, trainer_layouts
from tests.support.tiny import VARIANTS, write_checkpoint


def single_file(directory):
    return load_file(directory / "model.safetensors")


def piece(name, box, dtype=torch.float32):
    return Piece(name, box, "local", 0, row_major(box.shape), dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rank_reads_its_own_slices(variant, tmp_path):
    write_checkpoint(tmp_path, variant)
    model = read_architecture(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = single_file(tmp_path)
    for layout in trainer_layouts(model, tp=2, pp=2):
        tensors = blank(layout)
        CheckpointFiles(tmp_path).load(layout, tensors, shapes=hf_shapes(model))
        for param, expected in filled(layout, checkpoint).items():
            assert torch.equal(tensors[param].nan_to_num(-1), expected.nan_to_num(-1)), param


def test_shards_read_as_one_and_are_cast(tmp_path):
    write_checkpoint(tmp_path / "one", "llama")
    checkpoint = single_file(tmp_path / "one")
    names = sorted(checkpoint)
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: checkpoint[name] for name in part}, tmp_path / file)
    weight_map = {name: "ab"[number % 2] + ".safetensors" for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = CheckpointFiles(tmp_path)
    layout = files.layout()
    assert {stored.name: stored.box for stored in layout} == {name: whole(checkpoint[name].shape) for name in names}
    tensors = {name: torch.empty_like(checkpoint[name], dtype=torch.bfloat16) for name in names}
    files.load(layout, tensors)
    assert all(torch.equal(tensors[name], checkpoint[name].bfloat16()) for name in names)


def test_a_scalar_is_a_box_too(tmp_path):
    save_file({"scale": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    local = torch.zeros(1)
    CheckpointFiles(tmp_path).load([piece("scale", Box((), ()))], {"local": local})
    assert local.item() == 3


def test_a_directory_without_weights_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path} has no weights: neither model.safetensors nor"):
        CheckpointFiles(tmp_path)


def test_a_shard_that_is_not_there_is_named(tmp_path):
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lists model-00001-of-00002.safetensors, which does not exist"):
        CheckpointFiles(tmp_path).layout()


@pytest.mark.parametrize("elsewhere", ["../other/model.safetensors", "/other/model.safetensors", "a/../../x", "", 3])
def test_a_shard_of_another_directory_is_refused(elsewhere, tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    (directory := tmp_path / "model").mkdir()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": elsewhere}}))
    with pytest.raises(ValueError, match="is no file below|lists 3, which does not exist"):
        CheckpointFiles(directory).layout()


def test_an_index_that_is_none_is_named(tmp_path):
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match="index.json is no index of weights"):
            CheckpointFiles(tmp_path)


@pytest.mark.parametrize(
    ("name", "box", "shapes", "message"),
    [
        ("v", Box((0, 0), (4, 3)), None, "has no tensor v$"),
        ("lm_head.weight", Box((0, 0), (4, 3)), None, "no tensor lm_head.weight; .* tie_word_embeddings: true"),
        ("w", Box((0, 0), (5, 3)), None, r"w in .*model.safetensors has shape \(4, 3\); .* at least \[0:5, 0:3\]"),
        ("w", Box((0,), (4,)), None, r"has shape \(4, 3\)"),
        ("w", Box((0, 0), (2, 3)), {"w": (2, 3)}, r"has shape \(4, 3\); the model needs \(2, 3\)"),
        ("counts", Box((0,), (2,)), None, "counts is stored as I64; weights must be plain floats"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name, box, shapes, message, tmp_path):
    save_file({"w": torch.zeros(4, 3), "counts": torch.zeros(2, dtype=torch.int64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        CheckpointFiles(tmp_path).load([piece(name, box)], {"local": torch.zeros(20)}, shapes=shapes)


def test_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as file:
        file.write(b"ne")
        raise OSError("disk full")
    assert path.read_text() == "old"
    with replacing(path) as file:
        file.write(b"new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
