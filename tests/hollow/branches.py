"""The lines of megarl for CUDA, and which of them ran on the hollow device.

    python -m tests.hollow.branches LINES    # of `HOLLOW_LINES=LINES`; exit code 1: too few of the lines ran

They are the bodies of conditions on the device (`on_cuda()`, `x.is_cuda`, `device.type == "cuda"`), and what follows
one that ends the function on the CPU; of a condition within an expression, the line of the expression. Further they
are what needs no condition of its own: lines that name `torch.cuda`, private functions that only the lines above name,
and what launches the learner's kernels.
"""

import ast
import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from tests.hollow.lines import PACKAGE, PACKAGES

DEMANDED = 0.95  # of the lines
CONDITIONS = {"on_cuda", "has_transformer_engine", "has_apex_gradient_fusion"}
KERNELS = "learner/kernels/"
OF_THE_CPU = {"learner/patches/cpu.py"}  # asks which device Megatron-Core names, so that the CPU takes its place


@dataclass(frozen=True)
class Branch:
    """Lines for CUDA."""

    file: str  # within the package
    function: str
    lines: tuple[int, ...]
    has_both: bool = False  # the lines may name functions that the CPU runs too


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


def branches(source: str, file: str) -> list[Branch]:
    """Return the branches of a file with a text."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = [Branch(file, function.name, *lines) for function in functions for lines in _of(function, file) if lines[0]]
    lines_that_name = _lines_that_name(tree)
    num_found = 0
    while num_found < len(found):  # what they call may call others
        num_found = len(found)
        for_cuda = {line for branch in found if not branch.has_both for line in branch.lines}
        for function in functions:
            lines, body = lines_that_name.get(function.name, set()), _body(function)
            is_private = function.name.startswith("_") and not function.name.endswith("__")
            if is_private and lines and lines <= for_cuda and not for_cuda.issuperset(body):
                found.append(Branch(file, function.name, body))
    return found


def _lines_that_name(tree: ast.AST) -> dict[str, set[int]]:
    """Return the first lines of the statements that name a variable or an attribute, by its name."""
    first_lines, found = dict[int, int](), dict[str, set[int]]()
    for node in ast.walk(tree):  # inner statements come after outer ones
        if isinstance(node, ast.stmt):
            first_lines |= dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found.setdefault(name, set()).add(first_lines.get(node.lineno, node.lineno))  # decorators come before
    return found


def _of(function: ast.FunctionDef, file: str) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the lines of a function's branches, and whether they may name functions that the CPU runs too."""
    if any(isinstance(mark, ast.Attribute) and mark.attr == "jit" for mark in function.decorator_list):
        return  # Triton's interpreter runs a copy of the text
    if file.startswith(KERNELS):
        yield _body(function), False
        return
    yield from _within(function.body)
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                yield (node.lineno,), True


def _body(function: ast.FunctionDef) -> tuple[int, ...]:
    """Return the first lines of a function's statements, without its docstring."""
    return _lines(function.body[1:] if ast.get_docstring(function) else function.body)


def _within(block: Sequence[ast.stmt]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the lines behind the conditions of a block, as `_of` does."""
    for place, statement in enumerate(block):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(statement, ast.If):
            taken = side(statement.test)
            if taken:
                yield _lines(statement.body), False
            elif taken is False:
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                yield _lines(statement.orelse or (block[place + 1 :] if leaves else ())), False
        for expression in _expressions(statement):
            if any(side(part) is not None for part in ast.walk(expression) if isinstance(part, ast.expr)):
                yield (expression.lineno,), True
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
    lines = ["| file | functions whose lines for CUDA ran, and those that did not |", "|---|---|"]
    for file, parts in rows.items():
        ran_here, missing = (", ".join(f"`{name}`" for name in sorted(part)) for part in parts)
        lines.append(f"| `{file}` | {ran_here}{f'; not {missing}' * bool(missing)} |")
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
