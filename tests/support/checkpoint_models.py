"""Stand-ins for the models of a checkpoint in Hugging Face's format."""

from pathlib import Path

from megarl.checkpoint.huggingface import SavedModel


class ConfigOnly(SavedModel):
    """A model without weights, whose config is empty."""

    def __init__(self) -> None:
        """Make the model, of nothing."""

    def write_config(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
