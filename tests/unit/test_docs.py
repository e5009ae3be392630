"""Tests of the pages: their examples, links, paths, modules, keys, messages and pictures."""

import ast
import doctest
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from megarl.algorithms.config import AlgorithmSection, FilterGroupsSection, PolicyLossSection
from megarl.config.policy import ActorSection
from megarl.config.root import LINKS
from megarl.config.schema import Schema
from megarl.models.families import ALIASES, FAMILIES
from megarl.rewards.built_in import PREFIXES, RULES, SOURCES
from megarl.rewards.reasoning_gym import REFUSED
from megarl.tracking.offered import GROUP
from scripts.pictures import STEP, find_arrows, read_layers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"
ROOT_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
PAGES = sorted([*ROOT_PAGES, *DOCS.rglob("*.md")])
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
    """Return the names that a key may have."""
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


def test_a_table_names_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "models.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(["model_type", *FAMILIES, *ALIASES])


def test_the_tables_name_every_configuration_and_no_other() -> None:
    pages = [DOCS / "algorithms.md", DOCS / "training.md"]
    named = {file for page in pages for file in re.findall(r"`(\w+\.yaml)`", page.read_text())}
    assert named == {file.name for file in (ROOT / "configs").glob("*.yaml")}


def keys_in(text: str) -> Iterator[str]:
    """Yield the dotted keys that a page shows: as code in a sentence, on command lines, and in YAML blocks."""
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
    assert named >= RULES.keys()


def test_every_further_data_source_is_in_the_table() -> None:
    table = (DOCS / "rewards.md").read_text().split("Files that were made for other trainers")[1].split("###")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = {name: rule.strip(" `") for names, rule in rows for name in re.findall(r"`([^`]+)`", names)}
    assert named == SOURCES | {f"{prefix}...": rule for prefix, rule in PREFIXES.items()}


def test_every_refused_task_is_in_the_table() -> None:
    table = (DOCS / "data.md").read_text().split("| refused | because |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for names in rows for name in re.findall(r"`(\w+)`", names)} == REFUSED.keys()


def slug(heading: str) -> str:
    """Return the anchor that a forge gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if "://" in link or (target.exists() and not anchor):
            continue
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE) if target.is_file() else []
        if anchor not in map(slug, headings):
            broken.append(link)
    assert not broken


def codes_in(text: str) -> set[str]:
    """Return the words of a page's code: in sentences and in blocks."""
    return {word for code in re.findall(r"`+([^`]+)`+", text) for word in code.split()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_exists(page: Path) -> None:
    folders = "megarl|benchmarks|examples|tools|tests|scripts|docs|configs|docker|requirements"
    words = {word.strip("\"'(),:;") for word in codes_in(page.read_text())}
    paths = {word for word in words if re.fullmatch(rf"(?:{folders})/[\w./*-]+", word)}
    assert not [path for path in paths if not re.search("NAME|MODULE", path) and not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_module_exists(page: Path) -> None:
    names = set(re.findall(r"\b(?:megarl|benchmarks|tests\.support)(?:\.[a-z_]\w*)+", page.read_text()))
    assert not [name for name in names - {GROUP} if not exists(name)]


def exists(name: str) -> bool:
    """True if a dotted name is a module, or a word of a module."""
    module, words = ROOT, name.split(".")
    while words and ((module / words[0]).is_dir() or (module / f"{words[0]}.py").is_file()):
        module /= words.pop(0)
    if not words or words == ["md"]:
        return True
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return file.is_file() and all(re.search(rf"\b{word}\b", file.read_text()) for word in words)


def linked(page: Path) -> set[Path]:
    """Return the files that a page links to."""
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())}


def test_the_index_lists_every_page() -> None:
    pages = linked(DOCS / "index.md") | linked(DECISIONS / "index.md")
    assert pages == {*PAGES} - {DOCS / "index.md"}


def test_the_site_shows_every_page() -> None:
    """Hooks of the site add the decisions and the pages of the root."""
    text = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"^ +- (?:\w+: )?([\w/]+\.md)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert {DOCS / name for name in shown} == {*DOCS.rglob("*.md")} - {*DECISIONS.glob("*.md")}


def decisions() -> Iterator[tuple[str, str]]:
    """Yield the id and the text of every decision."""
    for page in sorted(DECISIONS.glob("*.md")):
        yield from re.findall(r"^\| ([PED]\d+) \| ([^|]+) \|", page.read_text(), re.MULTILINE)


def test_decision_ids_are_unique_and_replacements_exist() -> None:
    found = list(decisions())
    assert len(dict(found)) == len(found) > 300
    replacing = {name for _, text in found for name in re.findall(r"Replaced by (\w+)", text)}
    assert replacing
    assert replacing <= dict(found).keys()


def test_decision_pages_correspond_to_package_folders() -> None:
    folders = {path.name for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").is_file()}
    assert {page.stem for page in DECISIONS.glob("*.md")} <= folders | {"dependencies", "environment", "index"}


def test_comments_name_decisions_that_exist() -> None:
    files = [path for folder in ("megarl", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")]
    comments = [comment for file in files for comment in re.findall(r"#.*", file.read_text())]
    named = {name for comment in comments for name in re.findall(r"\bD\d{1,3}\b", comment)}
    assert len(named) > 10
    assert named <= dict(decisions()).keys()


def test_the_tree_names_every_package() -> None:
    tree = (DOCS / "architecture.md").read_text().split("## The packages")[1]
    packages = {path.name for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").is_file()}
    files = {path.name for path in (ROOT / "megarl").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"(\w+)/ ", tree)) >= packages
    assert set(re.findall(r"(\w+\.py)\b", tree)) >= files


def test_packages_picture_shows_imports_of_code() -> None:
    drawn = re.findall(r'id="(\w+)-&gt;(\w+)"', (DOCS / "images" / "packages.svg").read_text())
    assert set(drawn) == find_arrows(read_layers()), "run: python scripts/pictures.py packages"


def test_step_picture_shows_timed_phases_of_code() -> None:
    files = [*(ROOT / "megarl" / "training").glob("*.py"), *(ROOT / "megarl" / "weight_sync").glob("*.py")]
    timed = {name for file in files for name in re.findall(r'timers\("(\w+)"', file.read_text())}
    assert {name for _, name, _, _ in STEP} - timed == {"gate"}


def test_script_regenerates_every_picture(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "pictures.py", "--out", tmp_path], check=True)
    for picture in ("packages", "step", "memory", "sync"):
        assert (tmp_path / f"{picture}.svg").read_text().rstrip().endswith("</svg>")


def literals(file: Path) -> Iterator[str]:
    """Yield the texts of a program, with `...` in place of values."""
    if file.suffix != ".py":
        yield file.read_text()
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?\w", "...", node.value)


def test_every_message_is_in_the_code() -> None:
    texts = "\n".join(
        text for file in [*(ROOT / "megarl").rglob("*.py"), ROOT / "scripts" / "setup.sh"] for text in literals(file)
    )
    rows = re.findall(r"^\| `([^`]+)`", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    patterns = {row: r".*".join(map(re.escape, re.split(r"\.\.\.", row))) for row in rows}
    assert not [row for row, pattern in patterns.items() if not re.search(pattern, texts)]
