"""Hooks of mkdocs.yml: pages of the site that are no files of docs/, and links that leave docs/.

The pages of the root and a page of reference for each package are made while the site is built, so that each text has
one place.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {f"{name}.md": f"about/{name.lower()}.md" for name in ("README", "CONTRIBUTING", "AGENTS")}
"""Page of the root -> its place in the site."""
LINK = re.compile(r"(\]\()([^)\s#]+\.(?:md|png|svg|yaml|json))")


def packages() -> list[str]:
    """Return the names of the packages of megarl."""
    return sorted(path.parent.name for path in (ROOT / "megarl").glob("*/__init__.py"))


def on_config(config: Any) -> Any:
    """Add the made pages to the navigation."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md") if path.stem != "index")
    config.nav[0]["Begin"].insert(0, {"megarl": ROOT_PAGES["README.md"]})
    config.nav[2]["Understand and change"] += [
        {"Contributing": ROOT_PAGES["CONTRIBUTING.md"]},
        {"Agents": ROOT_PAGES["AGENTS.md"]},
        {"Decisions": ["decisions/index.md", *(f"decisions/{name}" for name in decisions)]},
    ]
    config.nav.append({"Reference": [{name: f"reference/{name}.md"} for name in packages()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make the pages of the root and of the reference."""
    for page, place in ROOT_PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / page).read_text(encoding="utf-8")))
    for name in packages():
        text = f"# megarl.{name}\n\n::: megarl.{name}\n    options: {{show_root_toc_entry: false}}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links of the repository at the places that pages have in the site."""
    place = page.file.src_uri
    source = {at: name for name, at in ROOT_PAGES.items()}.get(place, f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        target = ROOT_PAGES.get(target, target.removeprefix("docs/"))
        return match[1] + posixpath.relpath(target, posixpath.dirname(place) or ".")

    return LINK.sub(moved, markdown)
