"""The branches of megarl that only CUDA takes, and which of them ran on the hollow device.

    python -m tests.hollow.branches LINES    # of `HOLLOW_LINES=LINES`; exit code 1: too few of the lines ran

A branch is the body of a condition on the device (`on_cuda()`, `x.is_cuda`, `device.type == "cuda"`), or what follows
one that ends the function on the CPU. A condition within an expression is the line of the expression.
"""

import ast
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from tests.hollow.lines import PACKAGE, PACKAGES

DEMANDED = 0.95  # of the lines
CONDITIONS = {"on_cuda", "has_transformer_engine", "has_apex_gradient_fusion"}
OF_THE_CPU = {"learner/patches/cpu.py"}  # asks which device Megatron-Core names, so that the CPU takes its place


@dataclass(frozen=True)
class Branch:
    """Lines that only CUDA runs."""

    file: str  # within the package
    function: str
    lines: tuple[int, ...]


def side(test: ast.expr) -> bool | None:
    """Return whether a condition is true only on CUDA (True), false only there (False), or neither (None)."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = side(operand)
            return None if inner is None else not inner
        case ast.BoolOp(op=ast.And(), values=values):
            return True if True in map(side, values) else None
        case ast.BoolOp(op=ast.Or(), values=values):
            return False if False in map(side, values) else None
        case ast.Call(func=ast.Name(id=name)) if name in CONDITIONS:
            return True
        case ast.Attribute(attr="is_cuda"):
            return True
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() as operation], comparators=[ast.Constant(value="cuda")]):
            return isinstance(operation, ast.Eq)
    return None


def branches(source: str, file: str) -> Iterator[Branch]:
    """Yield the branches of a file with a text."""
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for lines in _within(function.body):
                if lines:
                    yield Branch(file, function.name, lines)


def _within(block: Sequence[ast.stmt]) -> Iterator[tuple[int, ...]]:
    for place, statement in enumerate(block):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If):
            taken = side(statement.test)
            if taken:
                yield _lines(statement.body)
            elif taken is False:
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                yield _lines(statement.orelse or (block[place + 1 :] if leaves else ()))
        for expression in _expressions(statement):
            if any(side(part) is not None for part in ast.walk(expression) if isinstance(part, ast.expr)):
                yield (expression.lineno,)
        for name in ("body", "orelse", "finalbody"):
            yield from _within(getattr(statement, name, ()))


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement, without those of its blocks and without the condition of an `if`."""
    for name, value in ast.iter_fields(statement):
        if name not in ("body", "orelse", "finalbody", "test"):
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.expr))


def _lines(block: Sequence[ast.stmt]) -> tuple[int, ...]:
    """Return the first lines of the statements of a block and of the blocks within."""
    return tuple(
        sorted({part.lineno for statement in block for part in ast.walk(statement) if isinstance(part, ast.stmt)})
    )


def all_branches() -> list[Branch]:
    """Return the branches of the package."""
    found = [file for package in PACKAGES for file in sorted((PACKAGE / package).rglob("*.py"))]
    files = {str(file.relative_to(PACKAGE)): file for file in found}
    return [
        branch
        for name, file in files.items()
        if name not in OF_THE_CPU
        for branch in branches(file.read_text(encoding="utf-8"), name)
    ]


def table(ran: Set[str]) -> str:
    """Return a table of the files with their functions, by whether all their lines are among those that ran."""
    rows: dict[str, tuple[set[str], set[str]]] = {}
    for branch in all_branches():
        is_missing = any(f"{branch.file}:{line}" not in ran for line in branch.lines)
        rows.setdefault(branch.file, (set(), set()))[is_missing].add(branch.function)
    lines = ["| file | functions whose branches of CUDA ran | did not run |", "|---|---|---|"]
    for file, parts in rows.items():
        lines.append(
            f"| `{file}` | " + " | ".join(", ".join(f"`{name}`" for name in sorted(part)) for part in parts) + " |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Print the table, and the share of the lines that ran."""
    ran = {line for name in argv for line in Path(name).read_text(encoding="utf-8").splitlines()}
    lines = {f"{branch.file}:{line}" for branch in all_branches() for line in branch.lines}
    share = len(lines & ran) / len(lines)
    print(f"{table(ran)}\n\n{len(lines & ran)} of {len(lines)} lines ran: {share:.1%}")
    return int(share < DEMANDED)


if __name__ == "__main__":
    sys.exit(main())
