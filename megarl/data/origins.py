"""The data sets of the Hugging Face hub that data files come from: `megarl prepare` notes their ids in the files."""

import json
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.platform.hub import parse_uri
from megarl.platform.uri import local_path
from megarl.section import listed

_KEY = b"megarl.datasets"


def as_note(datasets: Sequence[str]) -> dict[bytes, bytes]:
    """Return the metadata of a parquet file whose rows come from these data sets."""
    return {_KEY: json.dumps(datasets).encode()} if datasets else {}


def hub_datasets(files: str | Sequence[str] | None) -> list[str]:
    """Return the ids of the data sets that local parquet files note, and those of `hf://` URIs, each once."""
    return list(dict.fromkeys(dataset for file in listed(files) for dataset in _datasets_of(file)))


def _datasets_of(file: str) -> list[str]:
    address = parse_uri(file)
    if address:
        return [address.id] if address.kind == "dataset" else []
    path = local_path(file)
    try:
        metadata = pq.read_schema(path).metadata if path and path.is_file() else None
        noted = json.loads((metadata or {}).get(_KEY, b"[]"))
    except (pa.ArrowException, OSError, ValueError):  # megarl did not write it
        return []
    return [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else []
