"""Where a model's files are: a local directory, or a Hugging Face id that is downloaded once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.models.architecture import Architecture, read_architecture
from megarl.models.fields import Fields

CONFIG, GENERATION = "config.json", "generation_config.json"
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
    """The parsed `config.json` of a checkpoint with some of its fields replaced. Raises as `read_json` does."""
    return {**read_json(directory / CONFIG), **overrides}


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file is missing or unreadable, is no JSON, or is nested too deeply or no object.
    """
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{file.parent} has no {file.name}") from None
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply: write it again") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}; write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no JSON object, but a {type(content).__name__}: write it again")
    return content


def read_model(directory: Path, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], Architecture]:
    """The configuration of a checkpoint, overrides applied, and the model that it describes.

    Raises:
        ValueError: it cannot be read, or a value in it or in `generation_config.json` cannot be; names the file.
    """
    config = read_config(directory, overrides)
    try:
        architecture = read_architecture(config)
    except ValueError as error:  # it begins with the name of the file
        raise ValueError(f"{directory}/{error}") from error
    if (generation := directory / GENERATION).exists():
        declared = Fields.of(read_json(generation))
        try:
            declared.tokens("eos_token_id", architecture.vocab_size)
        except ValueError as error:
            raise ValueError(f"{generation}: {str(error).removeprefix('config.json: ')}") from error
    return config, architecture
