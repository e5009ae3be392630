"""Count habits that make prose hard to read: `python scripts/prose.py [--list] [PATH ...]`, by default everywhere.

Reads docstrings, comments and messages of Python files, and the text of Markdown files.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MESSAGE_WORDS = 4  # a string of fewer words is a name
PLACE = (
    r"(?:address|bucket|cell|clone|column|directory|directories|disk|docs|end|file|folder|graph|host|key|layer|line|"
    r"machine|module|node|page|path|place|point|position|process|rank|room|row|section|server|slot|stage|table|token)s?"
    r"|decides?|exactly|from|is|knows?|of|or|and|says?|sees?|shows?|states?|to"
)
"""After these words `where` names a place."""
MENTIONED = r"`[^`]*`|(?<!\*)\*[^*]+\*(?!\*)"
"""Code and words that a text only mentions."""
SENTENCE = r"(?:^|(?<=[.:;!?]\s)|(?<=\*\*\s)|(?<=\|\s))"

HABITS = {
    "where for if": (r"\b[Ww]here\b(?!,)", "if, unless, when; `where` for places"),
    "what, who as a subject": (rf"{SENTENCE}(?:What|Who|Whose|Whoever|Whatever)\b(?![^.]*\?)", "a verb or a noun"),
    "chains of pronouns": (
        r"\b(?:of|for|from|with|by|to|on|at|as) (?:which|whom)\b"
        r"|\b(?:one|those|that|them|it) (?:of|that|which|whose) (?:it|one|them|those|these)\b",
        "the noun",
    ),
    "but for": (r"\bbut for\b|\bbeside\b", "except; alongside, asynchronously"),
    "go on": (r"\b(?:go|goes|going|went) on\b", "resume, continue"),
    "otherwise": (r"\b(?:is|are|was|were|be) otherwise\b|\botherwise than\b", "differ"),
    "tell, say": (r"\b(?:told to|tells? apart|is told|are told|says? so|said so)\b", "notify, report"),
    "stand": (r"\b(?:stands?|stood) (?:at|in|for|there|on|still|before|first|last)\b", "is"),
    "whole": (r"\b(?:is|are|be|was|a|newest|latest|last) whole\b(?! number)", "complete, intact"),
}
"""Habit -> its pattern, and what to write instead."""


class Text(NamedTuple):
    """A piece of prose and its first line."""

    path: Path
    line: int
    words: str


class Finding(NamedTuple):
    """A habit in a piece of prose."""

    habit: str
    place: str
    words: str


def tracked_files(paths: Iterable[str]) -> list[Path]:
    """Return the tracked Python and Markdown files below `paths`."""
    command = ["git", "ls-files", "-z", *paths]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name.endswith((".py", ".md"))]
    return [file for file in files if file.is_file()]


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the prose of a file."""
    content = path.read_text(encoding="utf-8")
    yield from _texts_of_markdown(path, content) if path.suffix == ".md" else _texts_of_python(path, content)


def _texts_of_markdown(path: Path, content: str) -> Iterator[Text]:
    is_code = False
    for number, line in enumerate(content.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("    ", "#")):
            yield Text(path, number, line)


def _texts_of_python(path: Path, content: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= MESSAGE_WORDS:
            for offset, line in enumerate(node.value.splitlines()):
                yield Text(path, node.lineno + offset, line.strip())
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type == tokenize.COMMENT:
            yield Text(path, token.start[0], token.string.lstrip("# "))


def find(text: Text) -> Iterator[Finding]:
    """Yield the habits of a piece of prose."""
    words = re.sub(MENTIONED, "", text.words)
    for habit, (pattern, _) in HABITS.items():
        for match in re.finditer(pattern, words):
            if habit == "where for if" and re.search(rf"\b(?:{PLACE}),?\W*$", words[: match.start()]):
                continue
            yield Finding(habit, f"{text.path.relative_to(ROOT)}:{text.line}", text.words)


def main() -> None:
    """Print the counts, and with `--list` every finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="files and directories of the repository")
    parser.add_argument("--list", action="store_true", help="print every finding")
    options = parser.parse_args()
    findings = [finding for path in tracked_files(options.paths) for text in texts_of(path) for finding in find(text)]
    for finding in findings if options.list else ():
        print(f"{finding.place}: {finding.habit}: {finding.words}")
    counts = Counter(finding.habit for finding in findings)
    for habit, (_, instead) in HABITS.items():
        print(f"{counts[habit]:6}  {habit:24} write: {instead}")


if __name__ == "__main__":
    main()
