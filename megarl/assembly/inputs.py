"""The files that a run reads, by size and checksum: data, templates, tokenizers and frozen models.

A checkpoint keeps these descriptions, so that a resume names each file with another content under the same name. A
file of weights is described by its size and blocks of it, and a file at a URI by its size and the mark that its store
gives it (an ETag or a time), because a checksum would read all of it.
"""

import logging
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.checkpoint.manifest import checksum
from megarl.config.root import Config, RunConfig, SupervisedConfig
from megarl.data.template import is_template
from megarl.models.config import CheckpointSection
from megarl.platform.errors import UserError
from megarl.platform.hub import downloaded
from megarl.platform.remote import remote_directory, split_uri
from megarl.platform.secrets import redact
from megarl.platform.uri import is_uri, local_path
from megarl.section import listed

logger = logging.getLogger(__name__)

Inputs = dict[str, dict[str, str]]
"""The description of each file, by the key that names it and by its own name."""
TEXTS = (".jinja", ".json", ".model", ".py", ".tiktoken", ".txt")
"""Suffixes of the files of a model that are read completely."""
WEIGHTS = ".safetensors"
MARKERS = ("config.json", "tokenizer.json", "tokenizer_config.json")
NUM_BLOCKS = 64
BLOCK_BYTES = 1 << 16


def inputs_of(config: Config | SupervisedConfig) -> Inputs:
    """Describe the files that a run reads. A warning names a file that cannot be described. Not collective."""
    assert isinstance(config, RunConfig), "a run without data"
    found: Inputs = {}
    for key, name in _files(config):
        found.setdefault(key, {}).update(_describe(key, name))
    for key, section, is_frozen in _models(config):
        found.setdefault(key, {}).update(_describe_model(key, section, is_frozen=is_frozen))
    return {key: files for key, files in found.items() if files}


def _files(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the data files and the chat template, each with its key."""
    data = config.data
    named = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    if isinstance(config, Config):
        named["actor_rollout_ref.actor.ptx_files"] = config.actor_rollout_ref.actor.ptx_files
    for key, files in named.items():
        for name in listed(files):
            yield key, name
    if data.chat_template and not is_template(data.chat_template):
        yield "data.chat_template", data.chat_template


def _models(config: RunConfig) -> Iterator[tuple[str, CheckpointSection, bool]]:
    """Yield the models and tokenizers, each with its key, and whether the run keeps reading the weights."""
    frozen = ("actor_rollout_ref.ref.", "reward_model.")
    for key, section in config.checkpoints:
        is_reference = isinstance(config, Config) and config.has_reference and None not in config.teachers
        yield key, section, key.startswith(frozen) or (key.startswith("actor_rollout_ref.model.") and is_reference)
    known = {section.path for _, section in config.checkpoints}
    tokenizers = {"data.tokenizer": config.data.tokenizer}
    if isinstance(config, Config) and config.has_critic:
        tokenizers["critic.model.tokenizer_path"] = config.critic.model.tokenizer_path
    if isinstance(config, Config) and config.reward_model.enable:
        tokenizers["reward_model.model.input_tokenizer"] = config.reward_model.model.input_tokenizer
    for key, path in tokenizers.items():
        if path and path not in known:
            yield key, CheckpointSection(path=path), False


def _describe_model(key: str, section: CheckpointSection, *, is_frozen: bool) -> dict[str, str]:
    """Describe the files in the directory of a model or a tokenizer, or the one file of a tokenizer."""
    suffixes = (*TEXTS, WEIGHTS) if is_frozen else TEXTS
    try:
        place = local_path(section.path)
        if place is None and not section.path.endswith(".model"):
            remote = remote_directory(section.path)
            described = remote.describe(sorted(name for name in remote.sizes if name.endswith(suffixes)))
            return {redact(f"{remote}/{file.name}"): f"{file.size} bytes, {file.mark}" for file in described}
        if place and not place.exists():
            place = downloaded(section.path, MARKERS)
            if place is None:
                raise UserError("it is neither here nor in the cache of the hub")
        if place is None or place.is_file():
            return _describe(key, section.path)
        files = [path for path in sorted(place.iterdir()) if path.is_file() and path.name.endswith(suffixes)]
        return {redact(f"{section.path}/{path.name}"): _local(path) for path in files}
    except (UserError, OSError) as error:
        return _unknown(key, section.path, error)


def _describe(key: str, name: str) -> dict[str, str]:
    """Describe one file by its name; nothing if that is impossible."""
    try:
        if is_uri(name) and local_path(name) is None:
            parent, base = split_uri(name)
            (file,) = remote_directory(parent).describe([base])
            return {redact(name): f"{file.size} bytes, {file.mark}"}
        path = local_path(name) or Path(name)
        return {redact(name): _rows(path) + _local(path)}
    except (UserError, OSError) as error:
        return _unknown(key, name, error)


def _unknown(key: str, name: str, error: Exception) -> dict[str, str]:
    logger.warning(redact(f"{key}: a resume will not notice another content of {name}, which cannot be read: {error}"))
    return {}


def _rows(path: Path) -> str:
    """Return the number of rows of a parquet file in words; '' for any other file."""
    try:
        return f"{pq.read_metadata(path).num_rows} rows, "
    except pa.ArrowInvalid:
        return ""


def _local(path: Path) -> str:
    facts = path.stat()
    found = _checksum(path, facts.st_size, facts.st_mtime_ns, in_blocks=path.suffix == WEIGHTS)
    return f"{facts.st_size} bytes, CRC-32 {found:08x}"


@cache
def _checksum(path: Path, size: int, modified_ns: int, *, in_blocks: bool) -> int:
    """Return the CRC-32 of a file, or of NUM_BLOCKS blocks of it; `modified_ns` tells whether a known one is valid."""
    del modified_ns
    with path.open("rb") as file:
        if not in_blocks or size <= NUM_BLOCKS * BLOCK_BYTES:
            return checksum(file)
        value = 0
        for number in range(NUM_BLOCKS):
            file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
            value = zlib.crc32(file.read(BLOCK_BYTES), value)
        return value
