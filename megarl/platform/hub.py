"""Models and tokenizers of the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path


def snapshot(name: str, patterns: Sequence[str]) -> Path:
    """Download files of a Hugging Face id. A hub that cannot be reached is asked once: retries take half a minute.

    Raises:
        ValueError: the hub has no such model, or cannot be reached and the files are not here.
    """
    from huggingface_hub import snapshot_download  # takes half a second, which local models save

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no local directory, and as a Hugging Face id it failed: {error}\nWithout a network, "
            "download it on another machine and name its directory; a model behind a licence needs HF_TOKEN"
        ) from error
