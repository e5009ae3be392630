"""The examples in the documentation do what the documentation says."""

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from megarl.algorithms.config import AlgorithmSection, FilterGroupsSection, PolicyLossSection
from megarl.config.policy import ActorSection
from megarl.config.root import LINKS
from megarl.config.schema import Schema
from megarl.rewards import PREFIXES, REWARDS, SOURCES
from megarl.rewards.reasoning_gym import REFUSED

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted([DOCS.parent / "README.md", *DOCS.rglob("*.md")])
SCHEMAS = [Schema.of(root) for root in LINKS]
LEAVES = {path for schema in SCHEMAS for path in schema.leaves}
SECTIONS = {path for schema in SCHEMAS for path in schema.sections}
SECTION_NAMES = {name for path in SECTIONS for name in path.split(".")}
FILES = ("json", "jsonl", "md", "model", "parquet", "py", "safetensors", "yaml")  # endings of names that are no keys


def test_the_resharding_example():
    outcome = doctest.testfile(str(DOCS / "resharding.md"), module_relative=False)
    assert outcome.attempted > 5
    assert outcome.failed == 0


def choices(section: type, key: str) -> list[str]:
    """The names that a key may have."""
    return list(get_args(get_type_hints(section)[key]))


@pytest.mark.parametrize(
    "name",
    [
        *choices(AlgorithmSection, "adv_estimator"),
        *choices(AlgorithmSection, "kl_penalty"),
        *choices(FilterGroupsSection, "metric"),
        *choices(ActorSection, "loss_agg_mode"),
        *choices(PolicyLossSection, "loss_mode"),
    ],
)
def test_every_algorithm_is_explained(name: str) -> None:
    tables = [line for line in (DOCS / "algorithms.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in line.split("|")[1] for line in tables)


def test_the_tables_name_every_configuration_and_no_other() -> None:
    pages = [DOCS / "algorithms.md", DOCS.parent / "README.md"]
    named = {file for page in pages for file in re.findall(r"`(\w+\.yaml)`", page.read_text())}
    assert named == {file.name for file in (DOCS.parent / "configs").glob("*.yaml")}


def keys_in(text: str) -> Iterator[str]:
    """The dotted keys that a page shows: as code in a sentence, on command lines, and in YAML blocks."""
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for document in yaml.safe_load_all(block):
            yield from leaves(document, "")
    yield from re.findall(r"(?:^|\s)\+?([a-z_]+(?:\.[a-z_]+)+)=", text)
    for code in re.findall(r"`([^`\n]+)`", text):
        found = re.match(r"([a-z_]+(?:\.[a-z_]+)+)(?:\.\*)?(?=$|[=:])", code)
        if found and found[1].split(".")[0] in SECTION_NAMES and not found[1].endswith(FILES):
            yield found[1]


def leaves(tree: Any, prefix: str) -> Iterator[str]:
    if isinstance(tree, dict) and prefix.removesuffix(".") not in LEAVES:
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix(".")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_that_is_shown_exists(page: Path) -> None:
    shown = set(keys_in(page.read_text()))
    assert not [
        key for key in shown if not any(known == key or known.endswith(f".{key}") for known in LEAVES | SECTIONS)
    ]


def test_every_built_in_reward_is_in_the_table() -> None:
    tables = [line for line in (DOCS / "rewards.md").read_text().splitlines() if line.startswith("|")]
    named = {name for line in tables for name in re.findall(r"`([\w/]+)`", line.split("|")[1])}
    assert named >= REWARDS.keys()


def test_every_further_data_source_is_in_the_table() -> None:
    table = (DOCS / "rewards.md").read_text().split("Files that were made for other trainers")[1].split("###")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = {name: rule.strip(" `") for names, rule in rows for name in re.findall(r"`([^`]+)`", names)}
    assert named == SOURCES | {f"{prefix}...": rule for prefix, rule in PREFIXES.items()}


def test_every_refused_task_is_in_the_table() -> None:
    table = (DOCS / "data.md").read_text().split("| refused | because |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for names in rows for name in re.findall(r"`(\w+)`", names)} == REFUSED.keys()
