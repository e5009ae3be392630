"""Where a model's files are: a local directory, or a Hugging Face id that is downloaded once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def local_directory(path: str, *, with_code: bool = False) -> Path:
    """The directory of a local checkpoint, or of the downloaded files of a Hugging Face id: data, unless `with_code`.

    Raises:
        ValueError: there is no such directory, and nothing could be downloaded under that id.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download  # half a second that local models need not wait

    try:
        return Path(snapshot_download(path, allow_patterns=[*FILES, *(["*.py"] if with_code else [])]))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no local directory, and as a Hugging Face id it failed: {error}") from error


def read_config(directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint with some of its fields replaced."""
    return {**json.loads((directory / "config.json").read_text()), **overrides}
