"""Count the code: `python scripts/size.py` prints the table of docs/benchmarks/size.md; `--page` writes the page.

Tokens leave out comments, line ends and indentation, and a docstring is one token. Rates are per thousand lines.
"""

import argparse
import ast
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "size.md"
FOLDERS = ("megarl", "benchmarks", "examples", "scripts", "tools", "tests")
LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)
RATES = ("walrus", "tuple assignment", "lambda", "conditional expression", "`Callable` parameter", "`Any`")
TEXT = """# Size of the code

`python scripts/size.py --page` writes this page. Tokens leave out comments and layout, and a docstring is one token.

{tables}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/benchmarks/size.md")
    text = TEXT.format(tables="\n\n".join(tables()))
    if parser.parse_args(argv).page:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


def tables() -> Iterator[str]:
    """Yield a table of the folders of the checkout, one of the packages of megarl, and one of rates."""
    yield table(("folder", *(ROOT / name for name in FOLDERS)))
    packages = sorted(path for path in (ROOT / "megarl").iterdir() if (path / "__init__.py").exists())
    yield table(("package", *packages))
    found = Counter[str]()
    num_lines = 0
    for file in (ROOT / "megarl").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        num_lines += source.count("\n")
        found.update(constructs(ast.parse(source)))
    rows = [f"| {name} | {1000 * found[name] / num_lines:.1f} |" for name in RATES]
    yield "\n".join(["| in `megarl`, per thousand lines | number |", "|---|---|", *rows])
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages if page != PAGE)
    yield f"The pages have {words:,} words."


def table(rows: tuple[str, *tuple[Path, ...]]) -> str:
    """Return a table with a row for each folder."""
    head, *folders = rows
    lines = [f"| {head} | files | lines | tokens | tokens a line that is not blank |", "|---|---|---|---|---|"]
    for folder in folders:
        sources = [file.read_text(encoding="utf-8") for file in folder.rglob("*.py")]
        filled = sum(bool(line.strip()) for source in sources for line in source.splitlines())
        tokens = sum(map(num_tokens, sources))
        lines.append(
            f"| `{folder.name}` | {len(sources)} | {sum(source.count(chr(10)) for source in sources):,} | {tokens:,} | "
            f"{tokens / max(filled, 1):.1f} |"
        )
    return "\n".join(lines)


def num_tokens(source: str) -> int:
    """Count the tokens of a file."""
    return sum(token.type not in LAYOUT for token in tokenize.generate_tokens(StringIO(source).readline))


def constructs(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each construct that packs code."""
    for node in ast.walk(tree):
        match node:
            case ast.NamedExpr():
                yield "walrus"
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                yield "tuple assignment"
            case ast.Lambda():
                yield "lambda"
            case ast.IfExp():
                yield "conditional expression"
            case ast.Name(id="Any"):
                yield "`Any`"
            case ast.arg(annotation=annotation) if annotation and "Callable[" in ast.unparse(annotation):
                yield "`Callable` parameter"


if __name__ == "__main__":
    main()
