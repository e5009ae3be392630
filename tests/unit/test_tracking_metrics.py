"""The table of metrics names what the code records, and nothing else; docs/metrics.md shows that table."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from megarl.algorithms.correction import mismatch_means, mismatch_sums
from megarl.algorithms.groups import statistics
from megarl.tracking import names
from scripts.metrics import GROUPS, TABLES, describe

ROOT = Path(__file__).parents[2]
OTHER_TABLE = ROOT / "megarl" / "rewards" / "built_in.py"
PATHS = [path for path in (ROOT / "megarl").rglob("*.py") if path != OTHER_TABLE]
NAMES = [metric.name for group in GROUPS.values() for metric in group]


@cache
def nodes() -> list[ast.AST]:
    """Return the syntax of the package, which only the process parses that runs these tests."""
    return [node for path in PATHS for node in ast.walk(ast.parse(path.read_text()))]


def calls(function: str) -> Iterator[str]:
    """Yield the first argument of every call of a function, if it is a text."""
    for node in nodes():
        if (
            isinstance(node, ast.Call)
            and node.args
            and getattr(node.func, "id", getattr(node.func, "attr", "")) == function
        ):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def keys() -> Iterator[str]:
    """Yield the texts with a slash that are keys of dictionaries, written there or in `tracking.names`."""
    for node in nodes():
        found = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
        for key in found:
            text = getattr(names, key.id, None) if isinstance(key, ast.Name) else getattr(key, "value", None)
            if isinstance(text, str) and "/" in text.strip("/"):
                yield text


@cache
def recorded() -> set[str]:
    """Return the names that the code records and that are written in it."""
    sums = mismatch_sums(torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.int64))
    of_validation = statistics([torch.ones(2)], [["a", "b"]], num=2)
    return (
        {*keys(), *calls("SFTObjective")}
        | {
            f"{name}/{end}"
            for name in (*calls("spread"), *calls("token_spread"), *calls("metrics"))
            for end in ("mean", "max", "min")
        }
        | {f"timing_s/{phase}" for phase in calls("timers")}
        | mismatch_means(sums).keys()
        | {f"val/countdown/{name}" for name in of_validation}
    )


def test_everything_that_the_code_records_is_described() -> None:
    assert len(recorded()) > 100
    assert [name for name in sorted(recorded()) if describe(name) is None] == []


def test_every_described_metric_is_recorded() -> None:
    known = recorded()
    scoring = {f"val/{name}" for name in known if name.startswith(("reward/", "episode/"))}
    held_out = {name.replace("reward_model/", "val/") for name in known if name.startswith("reward_model/")}
    learning = {
        f"{model}{name}"
        for model in ("actor/", "critic/", "")
        for name in (
            *("grad_norm", "lr", "router_agreement"),
            *("skipped_updates", "empty_minibatches", "idle_minibatches"),
        )
    }
    texts = {node.value for node in nodes() if isinstance(node, ast.Constant)}
    assert {name.rpartition("/")[2] for name in learning} <= texts
    exact = [name for name in NAMES if name == name.lower()]
    assert [name for name in exact if name not in known | scoring | held_out | learning] == []


def test_no_metric_is_described_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_every_table_is_described() -> None:
    assert set(calls("log_table")) == {table.name for table in TABLES}


@pytest.mark.parametrize(
    ("name", "described_as"),
    [
        ("val/test_score/openai/gsm8k", "val/test_score/SOURCE"),
        ("val/openai/gsm8k/best@16/mean", "val/SOURCE/best@K/mean"),
        ("val/reward/model/mean", "val/reward/model/mean"),
        ("val/reward/polite/mean", "val/reward/NAME/mean"),
        ("reward/polite/mean", "reward/NAME/mean"),
    ],
)
def test_user_metric_name_is_described_by_its_pattern(name: str, described_as: str) -> None:
    found = describe(name)
    assert found is not None
    assert found.name == described_as


@pytest.mark.parametrize("name", ["actor/unknown", "reward/polite/max", "val/gsm8k/mean@many", "losses"])
def test_another_name_is_not_described(name: str) -> None:
    assert describe(name) is None


def test_the_pages_equal_the_code() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
