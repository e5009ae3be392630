"""The adapters of a model: their targets, and their parts on the ranks of a split."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config.faults import ConfigError
from megarl.config.load import load_config, load_sft_config
from megarl.config.trial import find_architectures
from megarl.models.architecture import read_architecture
from megarl.models.grid import Grid
from megarl.models.lora import (
    Lora,
    adapted,
    adapted_projections,
    adapter_pieces,
    adapter_shapes,
    require_targets,
)
from megarl.models.peft import adapter_config, read_adapters
from megarl.models.trainer import parameter_shapes
from megarl.platform.errors import UserError
from megarl.platform.hub import repository
from tests.support.tiny import SIZES, VARIANTS

QUERY = ("model.layers.1.self_attn.q_proj", "decoder.layers.1.self_attention.linear_qkv")
DOWN = ("model.layers.0.mlp.down_proj", "decoder.layers.0.mlp.linear_fc2")
GRIDS = [Grid(num_ranks=1), Grid(num_ranks=2, tp=2), Grid(num_ranks=4, tp=4), Grid(num_ranks=4, tp=2, pp=2)]
OF_EXPERTS = [Grid(num_ranks=4, tp=2, ep=2), Grid(num_ranks=4, tp=2, ep=2, etp=1), Grid(num_ranks=4, ep=4)]


@pytest.mark.parametrize(
    ("targets", "excluded", "query", "down"),
    [
        ("all-linear", (), True, True),
        (("q_proj", "v_proj"), (), True, False),
        (("proj",), (), False, False),  # no end of a name
        (("linear_qkv",), (), True, False),
        (("linear_qkv", "linear_fc2"), ("linear_qkv",), False, True),
        (r".*layers\.0\..*", (), False, True),
        ("q_proj", (), False, False),  # an expression for the whole name
        ("all-linear", r".*down_proj", True, False),
    ],
)
def test_targets_are_those_of_peft(targets: Any, excluded: Any, query: bool, down: bool) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=targets, excluded=excluded)
    assert (lora.adapts(*QUERY), lora.adapts(*DOWN)) == (query, down)


def test_scale_is_alpha_by_rank() -> None:
    assert Lora(rank=8, alpha=16.0).scale == 2.0


@pytest.mark.parametrize("base", ["ann/base", "hf://ann/base@v1", "hf://ann/base@refs/pr/3"])
def test_adapters_keep_revision_of_base(base: str, tmp_path: Path) -> None:
    config = adapter_config(Lora(rank=8, alpha=16.0, base=base), architecture("llama"))
    assert config["base_model_name_or_path"] == "ann/base"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert repository(read_adapters(tmp_path).base) == repository(base)


def test_files_keep_what_was_trained(tmp_path: Path) -> None:
    lora = Lora(rank=8, alpha=12.0, targets=("q_proj", "up_proj"), dropout=0.1)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(lora, architecture("llama"))))
    assert read_adapters(tmp_path) == lora


def architecture(variant: str) -> Any:
    return read_architecture(SIZES | VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_hold_every_element(variant: str) -> None:
    """Paint the boxes of all ranks: together they cover everything, and the boxes of a rank never overlap."""
    sizes = architecture(variant)
    lora = Lora(rank=3, alpha=3.0)
    shapes = adapter_shapes(sizes, lora)
    for grid in GRIDS + (OF_EXPERTS if sizes.experts else []):
        painted = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
        for rank in range(grid.num_ranks):
            of_rank = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
            for name, shape in (item for chunk in parameter_shapes(sizes, grid, rank) for item in chunk.items()):
                part = adapted(sizes, lora, name, shape, cut=grid.cut(rank))
                if part is None:
                    continue
                a, b = (torch.zeros(of, dtype=torch.int32) for of in part.shapes(lora.rank))
                for piece in adapter_pieces(part, lora.rank, a="a", b="b", place=0, dtype=torch.int32):
                    view = piece.view({"a": a, "b": b}[piece.param])
                    view += 1
                    of_rank[piece.name][tuple(map(slice, piece.box.lo, piece.box.hi))] += 1
                assert a.eq(1).all() and b.eq(1).all(), "a local element belongs to one adapter"
            for name, marks in of_rank.items():
                assert marks.max() <= 1, f"{name} overlaps on rank {rank} of {grid}"
                painted[name] += marks
        assert all(marks.min() >= 1 for marks in painted.values()), grid


def test_names_of_projections_select_them_alone() -> None:
    sizes = architecture("llama")
    everything = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert adapted_projections(sizes, Lora(rank=2, alpha=2.0)) == everything
    first = Lora(rank=2, alpha=2.0, targets=r".*layers\.0\..*[qv]_proj")
    assert adapted_projections(sizes, first) == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]


def test_a_rank_above_the_hidden_size() -> None:
    model = architecture("llama")
    require_targets(model, Lora(rank=model.hidden_size, alpha=2.0))
    with pytest.raises(UserError, match="lora_rank: .* exceeds the model's hidden size"):
        require_targets(model, Lora(rank=model.hidden_size + 1, alpha=2.0))


def test_linear_attention_has_no_adapters() -> None:
    model = architecture("qwen3_next")
    with pytest.raises(
        UserError, match="all-linear means .* linear attention too.*name some of down_proj, gate_proj, "
    ):
        require_targets(model, Lora(rank=2, alpha=2.0))
    require_targets(model, Lora(rank=2, alpha=2.0, targets=("q_proj",)))
    with pytest.raises(UserError, match="in_proj_ba selects no projection"):
        require_targets(model, Lora(rank=2, alpha=2.0, targets=("q_proj", "in_proj_ba")))


@pytest.mark.parametrize(
    ("targets", "excluded", "message"),
    [
        (("q_proj", "vproj"), (), "target_modules: vproj selects no projection of the model, which has down_proj, "),
        (r".*\.qproj", (), r"target_modules: .*\.qproj selects no projection"),
        ("all-linear", ("lm_head",), "exclude_modules: lm_head selects no projection"),
        ("all-linear", "all-linear", "exclude_modules: all-linear selects no projection"),
        (("q_proj",), ("linear_qkv",), "exclude_modules leaves no projection"),
    ],
)
def test_names_that_select_nothing_are_faults(targets: Any, excluded: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        require_targets(architecture("llama"), Lora(rank=2, alpha=2.0, targets=targets, excluded=excluded))
    assert message in str(raised.value)


def test_a_check_finds_targets_that_select_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | VARIANTS["llama"] | {"max_position_embeddings": 4096}))
    config = load_config(
        [
            "data.train_files=a",
            f"actor_rollout_ref.model.path={tmp_path}",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "actor_rollout_ref.model.lora_rank=4",
            "actor_rollout_ref.model.target_modules=[qproj]",
        ],
        world_size=None,
        check_paths=False,
    )
    with pytest.raises(ConfigError, match="qproj selects no projection"):
        find_architectures(config)


@pytest.mark.parametrize(("name", "is_fault"), [("exclude_modules", False), ("target_modules", True)])
def test_only_exceptions_may_be_an_empty_list(name: str, is_fault: bool) -> None:
    argv = ["data.train_files=a", "model.path=org/m", "model.lora_rank=4", f"model.{name}=[]"]
    with pytest.raises(ConfigError, match="selects no projection") if is_fault else nullcontext():
        load_sft_config(argv, world_size=None, check_paths=False)


def test_all_targets_may_stand_in_a_list() -> None:
    argv = ["data.train_files=a", "model.path=org/m", "model.lora_rank=4", "model.target_modules=[all-linear]"]
    assert load_sft_config(argv, world_size=None, check_paths=False).model.target_modules == "all-linear"
