"""The text model in the `config.json` of a model of images and text."""

from collections.abc import Mapping

from megarl.models.families import FAMILIES
from megarl.platform.errors import UserError
from megarl.reshard.wrapped import TEXT

WRAPPERS: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
"""`model_type` of a model of images and text -> those of its text model; the first is usual."""
OF_BOTH = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "tie_word_embeddings",
)
"""Keys of the whole model that hold for its text model too, and that count more than those of `text_config`."""


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """Return the parsed `config.json` of the text model of a model of images and text; another one as it is.

    Raises:
        UserError: the text model has an unknown family.
    """
    families = WRAPPERS.get(str(config.get("model_type")))
    text = config.get(TEXT)
    if families is None or not isinstance(text, dict):
        return dict(config)
    family = text.get("model_type", families[0])
    if family not in families:
        known = " or ".join(families)
        raise UserError(f"config.json: {TEXT}.model_type {str(family)[:60]}: the text model must be {known}")
    of_both = {key: config[key] for key in OF_BOTH if config.get(key) is not None}
    return {**text, **of_both, "model_type": family, "architectures": [FAMILIES[family].model_class]}
