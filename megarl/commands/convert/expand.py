"""Words of shell scripts, expanded from known variables. Nothing is run, and no file is looked at.

A part that only the environment or another program could tell becomes a mark in the text: `unset(name)` or `UNKNOWN`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate

from megarl.commands.convert.arithmetic import evaluate
from megarl.commands.convert.shell_syntax import Assigned, Document, past
from megarl.platform.errors import UserError

UNKNOWN = "\ue002"
"""The output of a program that was not run."""
_UNSET = re.compile("\ue000(\\w+)\ue001")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(
    rf"(?P<name>{_NAME.pattern})(?:\[(?P<index>[^\]]*)\])?(?P<operation>:?[-=+?]|%%?|##?|//?|\^\^?|,,?|:)?(?P<operand>.*)",
    re.DOTALL,
)
_ITEM = re.compile(r"\[([^\]]*)\]=(.*)", re.DOTALL)
_MOST_CHARACTERS = 200_000
_MOST_WORDS = 200
_CHANGING = ("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "BASHPID", "PPID", "$", "!")
"""Parameters that differ each time."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": ""}
_BLANKS = " \t\n"

Variable = str | dict[str, str]
"""A text, or the items of an array by their indices or names."""
Value = str | list[str]
"""A text, or the fields of a list."""
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


def known_name(text: str) -> str | None:
    """Return a name or a path without the output of programs, such as a date; None if a part of it is nothing else."""
    parts = []
    for part in text.split("/"):
        known = re.sub(f"[-_.]*{UNKNOWN}", "", part).lstrip("-_") if UNKNOWN in part else part
        if part and not known:
            return None
        parts.append(known)
    return "/".join(parts)


def without_marks(text: str) -> str:
    """Return a text in which variables that are not set are empty."""
    return _UNSET.sub("", text)


def array_of(fields: Sequence[str]) -> dict[str, str]:
    """Return an array with these items."""
    return {str(place): field for place, field in enumerate(fields)}


def fields_of(value: Variable | None) -> list[str]:
    """Return the items of a variable: of a text itself, unless it is empty."""
    if isinstance(value, dict):
        return list(value.values())
    return [value] if value else []


def matches(text: str, pattern: str) -> bool:
    """Return whether a text matches a pattern of the shell."""
    return re.fullmatch(translate(pattern), text, re.DOTALL) is not None


def split_at(separators: str, text: str, most: int = 0) -> list[str]:
    """Cut a text at runs of separators, `most` times at most; 0: at all."""
    return re.split(f"[{re.escape(separators)}]+", text, maxsplit=most) if separators else [text]


class Expander:
    """Expands words from `variables` and the script's `arguments`."""

    def __init__(self, variables: dict[str, Variable], arguments: list[str], substitute: Substitute) -> None:
        self.variables = variables
        self.arguments = arguments
        self.substitute = substitute

    def fields(self, word: str) -> list[str]:
        """Return what a word becomes: one text, none, or several."""
        fields: list[str] = []
        for number, one in enumerate(braces(word)):
            fields += self._split(one)
            if sum(map(len, fields)) > _MOST_CHARACTERS or number > _MOST_WORDS:
                raise UserError("a word of the script becomes too long")
        return fields

    def _split(self, word: str) -> list[str]:
        """Expand a word, and split the parts that are not quoted."""
        fields: list[str] = []
        current: str | None = None  # the field that the next part continues
        for part, is_kept in self._parts(word):
            pieces = [part] if isinstance(part, str) else part
            if isinstance(part, str) and not is_kept:
                pieces = split_at(self._separators(), part)
            for number, piece in enumerate(pieces):
                if number and current is not None:
                    fields.append(current)
                    current = None
                if piece or is_kept:
                    current = (current or "") + piece
        return fields if current is None else [*fields, current]

    def _separators(self) -> str:
        separators = self.variables.get("IFS", _BLANKS)
        return separators if isinstance(separators, str) else _BLANKS

    def text(self, word: str, *, quoted: bool = False) -> str:
        """Return the text of a word that is not split, as in an assignment, or between quotes."""
        parts = (part for part, _ in self._parts(word, quoted=quoted))
        found = "".join(part if isinstance(part, str) else " ".join(part) for part in parts)
        if len(found) > _MOST_CHARACTERS:
            raise UserError("a word of the script becomes too long")
        return found

    def document(self, document: Document) -> str:
        """Return the text of a here-document or a here-string."""
        return document.text if document.is_quoted else self.text(document.text, quoted=not document.is_word)

    def _parts(self, word: str, *, quoted: bool = False) -> list[tuple[Value, bool]]:
        """Return the parts of a word, each with whether it is kept whole."""
        parts: list[tuple[Value, bool]] = []
        index = 0
        while index < len(word):
            one = word[index]
            is_letter = quoted and (one in "'\"" or word.startswith("$'", index))
            end = index + 1 if is_letter else past(word, index)
            piece = word[index:end]
            name = _NAME.match(word, end) if piece == "$" else None
            if one == "\\":
                parts.append((_escaped(piece, quoted=quoted), True))
            elif piece.startswith("$'"):
                parts.append((re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), piece[2:-1]), True))
            elif one == "'" and not quoted:
                parts.append((piece[1:-1], True))
            elif one == '"' and not quoted:
                parts.extend(self._parts(piece[1:-1], quoted=True) or [("", True)])
            elif name or len(piece) > 1:
                value = self._parameter(name[0]) if name else self._expansion(piece, quoted=quoted)
                parts.append((value, quoted or isinstance(value, list)))
                end = name.end() if name else end
            else:
                parts.append((piece, True))
            index = end
        return parts

    def _expansion(self, piece: str, *, quoted: bool) -> Value:
        """Expand `${...}`, `$(...)`, `$((...))` or backquotes."""
        if piece.startswith("$((") and piece.endswith("))"):
            return self.arithmetic(piece[3:-2])
        if piece.startswith("$("):
            return self.substitute(piece[2:-1])
        if piece.startswith("`"):
            return self.substitute(piece[1:-1].replace("\\`", "`"))
        return self._braced(piece[2:-1], quoted=quoted)

    def _braced(self, inner: str, *, quoted: bool) -> Value:
        """Expand what is inside `${...}`."""
        if inner.startswith("#") and len(inner) > 1:
            value = self._parameter(inner[1:].partition("[")[0], "@" if "[" in inner else None)
            return str(len(without_marks(value) if isinstance(value, str) else value))
        if inner.startswith("!"):
            return self._indirect(inner[1:])
        match = _BRACED.match(inner)
        if not match:
            return UNKNOWN
        name, index, operation, operand = match.groups()
        value = self._parameter(name, index)
        if isinstance(value, list):
            fields = self._operate_on_fields(name, value, operation, operand) if operation else value
            return self._separators()[:1].join(fields) if quoted and "*" in (name, index) else fields
        if not operation:
            return value
        found = self._operate(name, value, operation, operand)
        is_operand = operation[-1] in "-=+" and found != value and not quoted and ('"' in operand or "'" in operand)
        return self._split(operand) if is_operand else found

    def _operate_on_fields(self, name: str, fields: list[str], operation: str, operand: str) -> list[str]:
        """Return the fields of an array or of the arguments after an operation such as `:-` or `#`."""
        if operation.lstrip(":") in ("-", "=", "?", "+"):
            return fields if bool(fields) != operation.endswith("+") else fields_of(self.text(operand))
        if operation == ":":
            return self._slice(fields if name not in "@*" else ["script.sh", *fields], operand)
        return [self._operate(name, field, operation, operand) for field in fields]

    def _indirect(self, inner: str) -> Value:
        """Expand `${!NAME}`, the variable that NAME names, or `${!NAME[@]}`, the indices of an array."""
        if inner.endswith(("[@]", "[*]")):
            value = self.variables.get(inner[:-3])
            return list(value if isinstance(value, dict) else array_of(fields_of(value)))
        return self._parameter(self.text(f"${{{inner}}}")) if inner else ""

    def _parameter(self, name: str, index: str | None = None) -> Value:
        """Return the text of a parameter, or its fields if it is a list."""
        if name in ("@", "*"):
            return list(self.arguments)
        if name.isdigit():
            return "".join(["script.sh", *self.arguments][int(name) : int(name) + 1])
        if name == "#":
            return str(len(self.arguments))
        if name in _CHANGING and name not in self.variables:
            return UNKNOWN
        value = self.variables.get(name)
        if index in ("@", "*"):
            return fields_of(value)
        if value is None:
            return unset(name) if name.isidentifier() else ""
        return self._item(value, index or "0") if isinstance(value, dict) else value

    def _item(self, items: dict[str, str], index: str) -> str:
        """Return an item of an array by its name or its number, which counts from the end if it is negative."""
        written = self.text(index)
        if written in items:
            return items[written]
        number = self.arithmetic(index)
        if number.startswith("-"):
            return "".join(fields_of(items)[int(number) :][:1])
        return items.get(number, "")

    def assign(self, one: Assigned) -> None:
        """Give a variable its text, an array its items, or an item of an array its text."""
        old = self.variables.get(one.name)
        items = dict(old if isinstance(old, dict) else array_of(fields_of(old)))
        if one.place is not None:
            before = self._item(items, one.place) if one.append else ""
            items[self.text(one.place)] = before + self.text(one.words[0])
            self.variables[one.name] = items
        elif one.is_array or (one.append and isinstance(old, dict)):
            items = items if one.append else {}
            for word in one.words:
                named = _ITEM.match(word)
                if named:
                    items[self.text(named[1])] = self.text(named[2])
                else:
                    added = self.fields(word)
                    items |= {str(len(items) + place): field for place, field in enumerate(added)}
            self.variables[one.name] = items
        else:
            before = old if one.append and isinstance(old, str) else ""
            self.variables[one.name] = before + self.text(one.words[0])

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
                return "".join(self._slice(text, operand))
            case "^^" | "^" | ",," | ",":
                return _change_case(text, operation)
            case "/" | "//":
                old, _, new = operand.partition("/")
                side = old[:1] if old[:1] in ("#", "%") else ""
                pattern = re.sub(r"\\[zZ]$", "", translate(self.text(old.removeprefix(side))))
                if side == "#":
                    pattern = rf"\A(?:{pattern})"
                elif side == "%":
                    pattern = rf"(?:{pattern})\Z"
                return re.sub(pattern, lambda _: self.text(new), text, count=0 if operation == "//" else 1)
            case _:
                return _trim(text, operation, self.text(operand))

    def _slice(self, items: Sequence[str], operand: str) -> list[str]:
        """Return `start` or `start:length` of the characters of a text, or of fields."""
        start, _, length = operand.partition(":")
        try:
            first = int(self.arithmetic(start))
            count = int(self.arithmetic(length)) if length else len(items)
        except ValueError:
            return [UNKNOWN]
        if first < 0:
            first = max(first + len(items), 0)
        end = first + count if count >= 0 else len(items) + count
        return list(items[first:end])

    def arithmetic(self, expression: str) -> str:
        """Return the value of an expression of whole numbers; `UNKNOWN` if it is none."""
        try:
            return str(evaluate(without_marks(self.text(expression)), self))
        except (ValueError, ArithmeticError, RecursionError):
            return UNKNOWN

    def plain(self, name: str) -> str:
        """Return the text of a parameter, which is empty if nothing sets it."""
        return without_marks(str(self._parameter(name)))

    def set(self, name: str, text: str) -> None:
        """Give a variable its text."""
        self.variables[name] = text


def braces(word: str) -> Iterator[str]:
    """Yield the words that `a{b,c}d` or `{1..3}` expands to; any other word as it is."""
    index = 0 if word.count("{") < _MOST_WORDS else len(word)
    while index < len(word):
        if word[index] == "{":
            end, parts = _brace(word, index)
            if len(parts) > 1:
                for part in parts:
                    for rest in braces(part + word[end:]):
                        yield word[:index] + rest
                return
        index = past(word, index)
    yield word


def _brace(word: str, start: int) -> tuple[int, list[str]]:
    """Return the index behind the brace that begins at `start`, and its parts; none if it is never closed."""
    depth = 0
    index = start
    begin = start + 1
    parts: list[str] = []
    while index < len(word):
        one = word[index]
        depth += (one == "{") - (one == "}")
        if (one == "," and depth == 1) or not depth:
            parts.append(word[begin:index])
            begin = index + 1
        if not depth:
            bounds = _RANGE.fullmatch(parts[0]) if len(parts) == 1 else None
            return begin, _numbers(int(bounds[1]), int(bounds[2])) if bounds else parts
        index = past(word, index)
    return index, []


def _numbers(first: int, last: int) -> list[str]:
    if abs(last - first) >= _MOST_WORDS:
        raise UserError("a word of the script expands to too many words")
    step = 1 if first <= last else -1
    return list(map(str, range(first, last + step, step)))


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
