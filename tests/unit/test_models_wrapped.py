"""Models of images and text: the text model in them is read as if it were alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.models.architecture import hf_shapes, read_architecture
from megarl.models.claims import weight_faults
from megarl.models.config import ModelSection
from megarl.models.hub import read_config, read_model, stop_token_ids
from megarl.models.source import Source
from megarl.models.wrapped import WRAPPERS, text_config
from megarl.platform.errors import UserError
from megarl.reshard.files import CheckpointFiles
from megarl.reshard.headers import Stored
from megarl.reshard.wrapped import text_places
from tests.support.quantised import quantise
from tests.support.tiny import SIZES, VARIANTS
from tests.support.wrapped import WRAPPED, change_config, change_files, stack_experts, write_wrapped


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the text model, read as a rank does that needs all of them."""
    files = CheckpointFiles(directory)
    layout = files.layout()
    tensors = {piece.param: torch.empty(piece.box.shape) for piece in layout}
    files.load(layout, tensors, shapes=hf_shapes(read_model(directory, {})[1]))
    return tensors


def says(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 27)[None], logits_to_keep=24).logits


def text_model(directory: Path, scratch: Path) -> Any:
    """Return transformers' text model of the weights and the configuration that megarl reads."""
    scratch.mkdir()
    source = Source.read(ModelSection(path=str(directory)))
    (scratch / "config.json").write_text(json.dumps(source.config_in("float32")))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(scratch), dtype=torch.float32).eval()
    assert [type(model).__name__] == source.hf_config["architectures"]
    model.save_pretrained(scratch)
    names = load_file(scratch / "model.safetensors")
    tensors = loaded(directory)
    change_files(scratch, {name: tensors[name] for name in names})
    return AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32)


@pytest.mark.parametrize("variant", WRAPPED)
def test_text_model_says_what_the_whole_model_says(variant: str, tmp_path: Path) -> None:
    whole = write_wrapped(tmp_path / "whole", variant, tie_word_embeddings=variant == "gemma3_text")
    assert list(weight_faults(tmp_path / "whole", read_model(tmp_path / "whole", {})[1], needs_head=True)) == []
    torch.testing.assert_close(says(text_model(tmp_path / "whole", tmp_path / "text")), says(whole))


def test_architecture_is_that_of_the_text_checkpoint(tmp_path: Path) -> None:
    for variant in WRAPPED:
        write_wrapped(
            tmp_path / variant, variant, tie_word_embeddings=bool(VARIANTS[variant].get("tie_word_embeddings"))
        )
        alone = read_architecture(SIZES | VARIANTS[variant])
        assert read_model(tmp_path / variant, {})[1].with_scalar_head() == alone.with_scalar_head()
    assert {family for families in WRAPPERS.values() for family in families} == WRAPPED.keys()


def test_stacked_experts_are_read_by_expert(tmp_path: Path) -> None:
    whole = write_wrapped(tmp_path, "qwen3_5_moe_text", tie_word_embeddings=False)
    before = loaded(tmp_path)
    stack_experts(tmp_path, whole)
    assert not any(".experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    after = loaded(tmp_path)
    assert list(weight_faults(tmp_path, read_model(tmp_path, {})[1], needs_head=True)) == []
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("variant", ["gemma3_text", "ministral3"])
def test_names_of_new_transformers_mean_the_same(variant: str, tmp_path: Path) -> None:
    whole = write_wrapped(tmp_path, variant, tie_word_embeddings=False)
    before = loaded(tmp_path)
    change_files(tmp_path, whole.state_dict(), without="model")
    assert "model.language_model.norm.weight" in load_file(tmp_path / "model.safetensors")
    change_files(tmp_path, {}, without="multi_modal_projector")
    after = loaded(tmp_path)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_published_gemma_has_only_what_differs(tmp_path: Path) -> None:
    """The sizes of Gemma 3 with 4 billion parameters."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    config, architecture = read_model(tmp_path, {})
    assert architecture == read_architecture(theirs.to_dict())
    assert (config["eos_token_id"], stop_token_ids(tmp_path, 1)) == ([1, 106], [1, 106])
    assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in hf_shapes(architecture).values()) > 3.8e9


def test_fp8_blocks_are_read_below_the_prefix(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "ministral3", tie_word_embeddings=False)
    weights = quantise(tmp_path)
    assert list(weight_faults(tmp_path, read_model(tmp_path, {})[1], needs_head=True)) == []
    found = loaded(tmp_path)
    assert len(found) == 21
    assert all(torch.equal(tensor, weights[f"language_model.{name}"]) for name, tensor in found.items())


def test_tensor_of_no_part_is_refused_by_name(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "qwen3_5_text", tie_word_embeddings=False)
    change_files(tmp_path, {"model.audio_tower.weight": torch.ones(3)})
    with pytest.raises(UserError, match=r"model\.audio_tower\.weight, which the model of its config\.json does not"):
        Source.read(ModelSection(path=str(tmp_path)))


def test_other_output_layer_of_tied_model_is_refused(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "ministral3", tie_word_embeddings=True)
    change_files(tmp_path, {"language_model.lm_head.weight": torch.ones(211, 64)})
    with pytest.raises(UserError, match=r"lm_head\.weight, which differs .* write false"):
        Source.read(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("whole", "text", "tied"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False)],
)
def test_whole_model_decides_about_tied_embeddings(
    whole: bool | None, text: bool | None, tied: bool, tmp_path: Path
) -> None:
    write_wrapped(tmp_path, "ministral3")
    change_config(tmp_path, {"tie_word_embeddings": whole}, of_text={"tie_word_embeddings": text})
    assert read_model(tmp_path, {})[1].tied_embeddings is tied


def test_unknown_text_model_is_refused_with_its_place(tmp_path: Path) -> None:
    write_wrapped(tmp_path, "ministral3")
    change_config(tmp_path, {}, of_text={"model_type": "bert"})
    known = r"config\.json: text_config\.model_type bert: the text model must be mistral or ministral3"
    with pytest.raises(UserError, match=rf"{tmp_path}/{known}"):
        read_config(tmp_path, {})


def test_one_tensor_under_two_names_is_refused() -> None:
    twice = {name: Stored(Path("f"), "F32", (1,)) for name in ("lm_head.weight", "language_model.lm_head.weight")}
    with pytest.raises(UserError, match="are both lm_head.weight of the text model: remove one"):
        text_places(twice)


@given(config=st.dictionaries(st.text(), st.integers()))
def test_configuration_of_text_model_stays_as_it_is(config: dict[str, int]) -> None:
    assert text_config(config) == config
