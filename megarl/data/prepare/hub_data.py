"""Data sets of the Hugging Face hub: the files of a split, in the cache of the hub."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path

import yaml

from megarl.platform.errors import UserError
from megarl.platform.hub import CARD_FILE, matching, parse_uri, snapshot
from megarl.section import listed

TRAIN = "train"
KINDS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "csv", "tsv")
"""Endings of the files that hold rows, the preferred first."""
LOCAL = (".arrow", ".bz2", ".csv", ".feather", ".gz", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv", ".zst")
"""Suffixes of names that mean files, not data sets."""
_NAME = re.compile(r"((?:hf://datasets/)?[\w-][\w.-]*/[\w.-]+(?:@[^:]+)?)(?::(.+))?")
_OTHER_SPLITS = re.compile(r"(?<![a-z])(train|test|val|valid|validation|dev|eval)(?![a-z])")
_SHOWN_FILES = 5


@dataclass(frozen=True)
class HubData:
    """A data set of the hub, or one file of it."""

    name: str  # OWNER/NAME or hf://datasets/OWNER/NAME[@REVISION]
    id: str
    config: str | None = None
    file: str = ""  # '': all files of a split

    @classmethod
    def named(cls, name: str) -> "HubData | None":
        """Return what OWNER/NAME[:CONFIG] or hf://datasets/OWNER/NAME[@REVISION][/FILE] means; None: a local path.

        Asks no host.
        """
        address = parse_uri(name)
        if address and address.kind == "dataset" and address.file:
            return cls(name.removesuffix(f"/{address.file}"), address.id, file=address.file)
        found = _NAME.fullmatch(name)
        if not found or Path(name).exists() or Path(name).suffix.lower() in LOCAL:
            return None
        address = parse_uri(found[1])
        return cls(found[1], address.id if address else found[1], found[2])

    def files(self, split: str, kinds: Sequence[str] = KINDS) -> list[Path]:
        """Download the files of a split, and return their paths in order.

        The card of the data set declares the files; without such a card their names have the split in them.

        Raises:
            UserError: the hub has no such data set, configuration, split or file, or cannot be reached.
        """
        declared = [escape(self.file)] if self.file else self._declared(split)
        patterns = declared or [f"*.{kind}" for kind in kinds]
        place = snapshot(self.name, patterns, "dataset")
        paths = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        found = matching(paths, patterns)
        if not declared:
            found = self._by_name(found, split, kinds)
        if not found:
            known = ", ".join(paths[:_SHOWN_FILES])
            wanted = self.file or f"file of a split {split!r}"
            raise UserError(f"the data set {self.name} has no {wanted}; it has {known or 'no files of rows'}")
        return [place / path for path in found]

    def _by_name(self, paths: Sequence[str], split: str, kinds: Sequence[str]) -> list[str]:
        """Return the files of the first kind that belong to a split; files that name no split are for training."""
        word = re.compile(rf"(?<![a-z]){re.escape(split)}(?![a-z])")
        inside = [path for path in paths if self.config is None or self.config in path.split("/")]
        named = [path for path in inside if word.search(path)]
        unnamed = [path for path in inside if split == TRAIN and not _OTHER_SPLITS.search(path)]
        for kind in kinds:
            found = [path for path in named or unnamed if path.endswith(f".{kind}")]
            if found:
                return found
        return []

    def _declared(self, split: str) -> list[str]:
        """Return the patterns of the files of a split from the card of the data set; nothing if it declares none."""
        configs = {str(config.get("config_name")): config for config in self._configs()}
        if not configs:
            return []
        usual = [name for name, config in configs.items() if config.get("default") or name in ("default", "main")]
        name = self.config or (usual or list(configs))[0]
        if name not in configs or (len(configs) > 1 and not self.config and not usual):
            raise UserError(
                f"the data set {self.name} has the configurations {', '.join(configs)}: name a configuration, as in "
                f"{self.name}:{next(iter(configs))}"
            )
        splits = dict(_splits(configs[name].get("data_files")))
        if splits and split not in splits:
            raise UserError(f"{self.name} has the splits {', '.join(splits)}, but no split {split!r}")
        return splits.get(split, [])

    def _configs(self) -> list[Mapping[str, object]]:
        from huggingface_hub.repocard import metadata_load  # takes half a second

        card = snapshot(self.name, [CARD_FILE], "dataset") / CARD_FILE
        try:
            configs = (metadata_load(card) or {}).get("configs")
        except (OSError, ValueError, yaml.YAMLError):  # without a card, the names of files decide
            return []
        if not isinstance(configs, list):
            return []
        return [config for config in configs if isinstance(config, dict)]


def _splits(data_files: object) -> Iterator[tuple[str, list[str]]]:
    """Yield the splits in the `data_files` of a configuration, with their patterns: files alone are for training."""
    parts = data_files if isinstance(data_files, list) else [data_files]
    files = [part for part in parts if isinstance(part, str)]
    if files:
        yield TRAIN, files
    for part in parts:
        if isinstance(part, dict) and part.get("path"):
            yield str(part.get("split", TRAIN)), listed(part["path"])
