"""Words of shell scripts, expanded from known variables. Nothing is run, and no file is looked at.

A part that only the environment or another program could tell becomes a mark in the text: `unset(name)` or `UNKNOWN`.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate

from megarl.commands.convert.shell_syntax import past
from megarl.platform.errors import UserError

UNKNOWN = "\ue002"
"""The output of a program that was not run."""
_UNSET = re.compile("\ue000(\\w+)\ue001")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_INDEX = re.compile(r"\[([^\]]*)\]")
_OPERATION = re.compile(r":?[-=+?]|%%?|##?|//?|\^\^?|,,?|:")
_MOST_CHARACTERS = 200_000
_ARITHMETIC: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_LARGEST = 10**30

Variable = str | list[str]
Substitute = Callable[[str], str]
"""Returns the output of a command."""


def unset(name: str) -> str:
    """Return the mark of a variable that the script takes from the environment."""
    return f"\ue000{name}\ue001"


def links(text: str) -> str:
    """Return a text with `${oc.env:NAME}` for each such mark."""
    return _UNSET.sub(r"${oc.env:\1}", text)


def unset_names(text: str) -> list[str]:
    """Return the names of the variables that are marked in a text."""
    return _UNSET.findall(text)


def after_marks(text: str) -> str:
    """Return the end of a text, without marks."""
    return re.split(f"[{UNKNOWN}\ue001]", text)[-1]


def without_marks(text: str) -> str:
    """Return a text in which variables that are not set are empty."""
    return _UNSET.sub("", text)


def fields_of(value: Variable | None) -> list[str]:
    """Return the items of a variable: of a text itself, unless it is empty."""
    if isinstance(value, list):
        return value
    return [value] if value else []


def matches(text: str, pattern: str) -> bool:
    """Return whether a text matches a pattern of the shell."""
    return re.fullmatch(translate(pattern), text, re.DOTALL) is not None


class Expander:
    """Expands words from `variables` and the script's `arguments`."""

    def __init__(self, variables: dict[str, Variable], arguments: list[str], substitute: Substitute) -> None:
        self.variables = variables
        self.arguments = arguments
        self.substitute = substitute

    def fields(self, word: str) -> list[str]:
        """Return what a word becomes: one text, none, or several."""
        fields: list[str] = []
        current: str | None = None
        for text, is_quoted, is_list in self._parts(word):
            if is_list is not None:
                for number, item in enumerate(is_list):
                    if number:
                        fields.append(current or "")
                    current = item if number else (current or "") + item
            elif is_quoted:
                current = (current or "") + text
            else:
                pieces = re.split(r"[ \t\n]+", text)
                for number, piece in enumerate(pieces):
                    if number and current is not None:
                        fields.append(current)
                        current = None
                    current = (current or "") + piece if piece or current is not None else None
        if current is not None:
            fields.append(current)
        if sum(map(len, fields)) > _MOST_CHARACTERS:
            raise UserError("a word of the script becomes too long")
        return fields

    def text(self, word: str) -> str:
        """Return the text of a word that is not split, as in an assignment."""
        found = "".join(" ".join(is_list) if is_list is not None else text for text, _, is_list in self._parts(word))
        if len(found) > _MOST_CHARACTERS:
            raise UserError("a word of the script becomes too long")
        return found

    def _parts(self, word: str, *, quoted: bool = False) -> list[tuple[str, bool, list[str] | None]]:
        """Return the parts of a word: text, whether it is kept whole, and the fields of a list instead."""
        parts: list[tuple[str, bool, list[str] | None]] = []
        index = 0
        while index < len(word):
            one = word[index]
            end = past(word, index) if one in "\\$`" or (one in "'\"" and not quoted) else index + 1
            piece = word[index:end]
            if one == "\\":
                parts.append((_escaped(piece, quoted=quoted), True, None))
            elif piece.startswith("$'") and not quoted:
                parts.append((piece[2:-1], True, None))
            elif one == "'" and not quoted:
                parts.append((piece[1:-1], True, None))
            elif one == '"' and not quoted:
                parts.extend(self._parts(piece[1:-1], quoted=True) or [("", True, None)])
            elif one in "$`" and len(piece) > 1:
                text, several = self._expansion(piece, quoted=quoted)
                parts.append((text, quoted, several))
            elif one == "$" and (name := _NAME.match(word, end)):
                text, several = self._parameter(name[0], None, quoted=quoted)
                parts.append((text, quoted, several))
                end = name.end()
            else:
                parts.append((piece, True, None))
            index = end
        return parts

    def _expansion(self, piece: str, *, quoted: bool) -> tuple[str, list[str] | None]:
        """Expand `${...}`, `$(...)`, `$((...))` or backquotes."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.arithmetic(piece[3:-2]), None
        if piece.startswith("$("):
            return self.substitute(piece[2:-1]), None
        if piece.startswith("`"):
            return self.substitute(piece[1:-1].replace("\\`", "`")), None
        inner = piece[2:-1]
        if inner.startswith("#") and len(inner) > 1:
            text, several = self._parameter(inner[1:].partition("[")[0], "@" if "[" in inner else None, quoted=True)
            return str(len(several) if several is not None else len(without_marks(text))), None
        if inner.startswith("!"):
            return (self._parameter(self.text(f"${{{inner[1:]}}}"), None, quoted=True)[0] if inner[1:] else ""), None
        name = _NAME.match(inner)
        if not name:
            return UNKNOWN, None
        index = _INDEX.match(inner, name.end())
        text, several = self._parameter(name[0], index[1] if index else None, quoted=quoted)
        rest = inner[index.end() if index else name.end() :]
        operation = _OPERATION.match(rest)
        if several is not None and quoted and "*" in (name[0], index[1] if index else ""):
            text, several = " ".join(several), None
        if not operation:
            return text, several
        if several is not None:
            if operation[0].endswith("-") and not several:
                return self.text(rest[operation.end() :]), None
            return text, several
        return self._operate(name[0], text, operation[0], rest[operation.end() :]), None

    def _parameter(self, name: str, index: str | None, *, quoted: bool) -> tuple[str, list[str] | None]:
        """Return the text of a parameter, or its fields if it is a list."""
        if name in "@*":
            return "", list(self.arguments)
        if name.isdigit():
            known = ["script.sh", *self.arguments]
            return "".join(known[int(name) : int(name) + 1]), None
        if name == "#":
            return str(len(self.arguments)), None
        value = self.variables.get(name)
        if index in ("@", "*"):
            return "", fields_of(value)
        if value is None:
            return unset(name) if re.fullmatch(r"[A-Za-z_]\w*", name) else "", None
        if isinstance(value, list):
            number = self.arithmetic(index or "0")
            position = int(number) if number.lstrip("-").isdigit() else 0
            return (value[position] if -len(value) <= position < len(value) else ""), None
        return value, None

    def _operate(self, name: str, text: str, operation: str, operand: str) -> str:
        is_set = name in self.variables or (name.isdigit() and 0 < int(name) <= len(self.arguments))
        counts = bool(text) and is_set if operation.startswith(":") else is_set
        match operation.lstrip(":"):
            case "-" | "=" | "?":
                found = text if counts or operation.endswith("?") else self.text(operand)
                if operation.endswith("=") and not counts:
                    self.variables[name] = found
                return found
            case "+":
                return self.text(operand) if counts else ""
            case "":
                return self._slice(text, operand)
            case "^^" | "^" | ",," | ",":
                return _change_case(text, operation)
            case "/" | "//":
                old, _, new = operand.partition("/")
                pattern = re.sub(r"\\[zZ]$", "", translate(self.text(old)))
                return re.sub(pattern, lambda _: self.text(new), text, count=0 if operation == "//" else 1)
            case _:
                return _trim(text, operation, self.text(operand))

    def _slice(self, text: str, operand: str) -> str:
        start, _, length = operand.partition(":")
        try:
            first = int(self.arithmetic(start))
            return text[first:][: int(self.arithmetic(length))] if length else text[first:]
        except ValueError:
            return UNKNOWN

    def arithmetic(self, expression: str) -> str:
        """Return the value of an expression of whole numbers; `UNKNOWN` if it is none."""
        names = re.sub(r"(?<![\w$\{])([A-Za-z_]\w*)", r"${\1:-0}", expression)
        text = without_marks(self.text(names)).strip() or "0"
        text = text.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        if len(text) > 500:
            return UNKNOWN
        try:
            return str(int(_value(ast.parse(text, mode="eval").body)))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return UNKNOWN


def _value(node: ast.expr) -> int:
    """Return the value of a tree of numbers and operators. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=int() as number):
            found = int(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _value(left), _value(right)
            if not (0 <= power <= 60 and abs(base) <= 10**6):
                raise ValueError
            found = base**power
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            if type(op) not in _ARITHMETIC:
                raise ValueError
            found = int(_ARITHMETIC[type(op)](_value(left), _value(right)))
        case ast.BoolOp(op=op, values=values):
            combine = all if isinstance(op, ast.And) else any
            found = int(combine([_value(one) for one in values]))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            found = _value(body if _value(test) else otherwise)
        case _:
            raise ValueError
    if abs(found) > _LARGEST:
        raise ValueError
    return found


def _escaped(piece: str, *, quoted: bool) -> str:
    """Return the text of a backslash and the next character."""
    following = piece[1:]
    if following == "\n":
        return ""
    return following if not quoted or following in '$`"\\' else piece


def _change_case(text: str, operation: str) -> str:
    change = str.upper if operation[0] == "^" else str.lower
    return change(text) if len(operation) > 1 else change(text[:1]) + text[1:]


def _trim(text: str, operation: str, pattern: str) -> str:
    """Remove the shortest or longest beginning (`#`) or end (`%`) that matches a pattern."""
    sizes: Sequence[int] = range(len(text) + 1)
    for size in reversed(sizes) if len(operation) > 1 else sizes:
        part = text[:size] if operation[0] == "#" else text[len(text) - size :]
        if matches(part, pattern):
            return text[size:] if operation[0] == "#" else text[: len(text) - size]
    return text
