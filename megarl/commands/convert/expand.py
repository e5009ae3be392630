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
_ITEM = re.compile(r"\[([^\]]*)\]=(.*)", re.DOTALL)
_INDEX = re.compile(r"\[([^\]]*)\]")
_OPERATION = re.compile(r":?[-=+?]|%%?|##?|//?|\^\^?|,,?|:")
_MOST_CHARACTERS = 200_000
_MOST_WORDS = 200
_CHANGING = ("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "BASHPID", "PPID", "$", "!")
"""Parameters that differ each time."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": ""}

Variable = str | list[str] | dict[str, str]
"""A text, an array, or an array whose items have names."""
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
    if isinstance(value, dict):
        return list(value.values())
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
        for number, one in enumerate(braces(word)):
            fields += self._split(one)
            if sum(map(len, fields)) > _MOST_CHARACTERS or number > _MOST_WORDS:
                raise UserError("a word of the script becomes too long")
        return fields

    def _split(self, word: str) -> list[str]:
        """Expand a word, and split the parts that are not quoted."""
        fields: list[str] = []
        blanks = f"[{re.escape(self._separators())}]+" if self._separators() else "(?!)"
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
                pieces = re.split(blanks, text)
                for number, piece in enumerate(pieces):
                    if number and current is not None:
                        fields.append(current)
                        current = None
                    current = (current or "") + piece if piece or current is not None else None
        if current is not None:
            fields.append(current)
        return fields

    def _separators(self) -> str:
        separators = self.variables.get("IFS", " \t\n")
        return separators if isinstance(separators, str) else " \t\n"

    def text(self, word: str) -> str:
        """Return the text of a word that is not split, as in an assignment."""
        found = "".join(" ".join(is_list) if is_list is not None else text for text, _, is_list in self._parts(word))
        if len(found) > _MOST_CHARACTERS:
            raise UserError("a word of the script becomes too long")
        return found

    def document(self, document: Document) -> str:
        """Return the text of a here-document or a here-string."""
        if document.is_word:
            return self.text(document.text)
        if document.is_quoted:
            return document.text
        parts = self._parts(document.text, quoted=True)
        return "".join(" ".join(is_list) if is_list is not None else text for text, _, is_list in parts)

    def _parts(self, word: str, *, quoted: bool = False) -> list[tuple[str, bool, list[str] | None]]:
        """Return the parts of a word: text, whether it is kept whole, and the fields of a list instead."""
        parts: list[tuple[str, bool, list[str] | None]] = []
        index = 0
        while index < len(word):
            one = word[index]
            begins = one in "\\$`" and not (quoted and word.startswith("$'", index))
            end = past(word, index) if begins or (one in "'\"" and not quoted) else index + 1
            piece = word[index:end]
            if one == "\\":
                parts.append((_escaped(piece, quoted=quoted), True, None))
            elif piece.startswith("$'") and not quoted:
                parts.append((re.sub(r"\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), piece[2:-1]), True, None))
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
        return self._braced(piece[2:-1], quoted=quoted)

    def _braced(self, inner: str, *, quoted: bool) -> tuple[str, list[str] | None]:
        """Expand what is inside `${...}`."""
        if inner.startswith("#") and len(inner) > 1:
            text, several = self._parameter(inner[1:].partition("[")[0], "@" if "[" in inner else None, quoted=True)
            return str(len(several) if several is not None else len(without_marks(text))), None
        if inner.startswith("!"):
            return self._indirect(inner[1:])
        name = _NAME.match(inner)
        if not name:
            return UNKNOWN, None
        index = _INDEX.match(inner, name.end())
        text, several = self._parameter(name[0], index[1] if index else None, quoted=quoted)
        rest = inner[index.end() if index else name.end() :]
        operation = _OPERATION.match(rest)
        operand = rest[operation.end() :] if operation else ""
        if several is not None and operation:
            several = self._operate_on_fields(name[0], several, operation[0], operand)
            operation = None
        if several is not None and quoted and "*" in (name[0], index[1] if index else ""):
            text, several = self._separators()[:1].join(several), None
        if not operation:
            return text, several
        found = self._operate(name[0], text, operation[0], operand)
        is_operand = operation[0][-1] in "-=+" and found != text and not quoted and ('"' in operand or "'" in operand)
        return found, self._split(operand) if is_operand else None

    def _operate_on_fields(self, name: str, fields: list[str], operation: str, operand: str) -> list[str]:
        """Return the fields of an array or of the arguments after an operation such as `:-` or `#`."""
        if operation.lstrip(":") in ("-", "=", "?", "+"):
            return fields if bool(fields) != operation.endswith("+") else fields_of(self.text(operand))
        if operation == ":":
            return self._slice_of(fields if name not in "@*" else ["script.sh", *fields], operand)
        return [self._operate(name, field, operation, operand) for field in fields]

    def _indirect(self, inner: str) -> tuple[str, list[str] | None]:
        """Expand `${!NAME}`, the variable that NAME names, or `${!NAME[@]}`, the indices of an array."""
        name = inner.partition("[")[0]
        if inner.endswith(("[@]", "[*]")):
            value = self.variables.get(name)
            return "", list(value) if isinstance(value, dict) else [str(i) for i in range(len(fields_of(value)))]
        return (self._parameter(self.text(f"${{{inner}}}"), None, quoted=True)[0] if inner else ""), None

    def _parameter(self, name: str, index: str | None, *, quoted: bool) -> tuple[str, list[str] | None]:
        """Return the text of a parameter, or its fields if it is a list."""
        if name in "@*":
            return "", list(self.arguments)
        if name.isdigit():
            known = ["script.sh", *self.arguments]
            return "".join(known[int(name) : int(name) + 1]), None
        if name == "#":
            return str(len(self.arguments)), None
        if name in _CHANGING and name not in self.variables:
            return UNKNOWN, None
        value = self.variables.get(name)
        if index in ("@", "*"):
            return "", fields_of(value)
        if value is None:
            return unset(name) if re.fullmatch(r"[A-Za-z_]\w*", name) else "", None
        if isinstance(value, list):
            number = self.arithmetic(index or "0")
            position = int(number) if number.lstrip("-").isdigit() else 0
            return (value[position] if -len(value) <= position < len(value) else ""), None
        if isinstance(value, dict):
            written = self.text(index or "0")
            return value.get(written, value.get(self.arithmetic(index or "0"), "")), None
        return value, None

    def assign(self, one: Assigned) -> None:
        """Give a variable its text, an array its items, or an item of an array its text."""
        old = self.variables.get(one.name)
        if one.index is not None:
            item = self.text(one.index)
            before = self._parameter(one.name, one.index, quoted=True)[0] if one.append and old is not None else ""
            items = old if isinstance(old, dict) else {str(at): text for at, text in enumerate(fields_of(old))}
            changed = {**items, item: before + self.text(one.words[0])}
            is_list = isinstance(old, list) and list(changed) == [str(at) for at in range(len(changed))]
            self.variables[one.name] = list(changed.values()) if is_list else changed
        elif one.is_array and any(map(_ITEM.match, one.words)):
            named = (match for match in map(_ITEM.match, one.words) if match)
            items = {self.text(match[1]): self.text(match[2]) for match in named}
            self.variables[one.name] = {**(old if isinstance(old, dict) and one.append else {}), **items}
        elif one.is_array or (one.append and isinstance(old, list)):
            added = [item for word in one.words for item in self.fields(word)]
            self.variables[one.name] = [*fields_of(old), *added] if one.append else added
        else:
            before_text = old if one.append and isinstance(old, str) else ""
            self.variables[one.name] = before_text + self.text(one.words[0])

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
                side = old[:1] if old[:1] in ("#", "%") else ""
                pattern = re.sub(r"\\[zZ]$", "", translate(self.text(old.removeprefix(side))))
                pattern = rf"\A(?:{pattern})" if side == "#" else rf"(?:{pattern})\Z" if side else pattern
                return re.sub(pattern, lambda _: self.text(new), text, count=0 if operation == "//" else 1)
            case _:
                return _trim(text, operation, self.text(operand))

    def _slice(self, text: str, operand: str) -> str:
        try:
            return text[self._range(operand, len(text))]
        except ValueError:
            return UNKNOWN

    def _slice_of(self, items: Sequence[str], operand: str) -> list[str]:
        try:
            return list(items[self._range(operand, len(items))])
        except ValueError:
            return [UNKNOWN]

    def _range(self, operand: str, size: int) -> slice:
        """Return `start` or `start:length` as a slice of `size` items. Raises ValueError if these are no numbers."""
        start, _, length = operand.partition(":")
        first = int(self.arithmetic(start))
        first = max(first + size, 0) if first < 0 else first
        count = int(self.arithmetic(length)) if length else size
        return slice(first, first + count if count >= 0 else size + count)

    def arithmetic(self, expression: str) -> str:
        """Return the value of an expression of whole numbers; `UNKNOWN` if it is none."""
        try:
            return str(evaluate(without_marks(self.text(expression)), self._read, self.variables.__setitem__))
        except (ValueError, ArithmeticError, RecursionError, UserError):
            return UNKNOWN

    def _read(self, name: str) -> str:
        return without_marks(self._parameter(name, None, quoted=True)[0])


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
        index = past(word, index) if word[index] in "\\$`'\"" else index + 1
    yield word


def _brace(word: str, start: int) -> tuple[int, list[str]]:
    """Return the index behind the brace that begins at `start`, and its parts; none if it is never closed."""
    depth, index, begin = 0, start, start + 1
    parts: list[str] = []
    while index < len(word):
        one = word[index]
        depth += (one == "{") - (one == "}")
        if (one == "," and depth == 1) or not depth:
            parts.append(word[begin:index])
            begin = index + 1
        if not depth:
            bounds = _RANGE.fullmatch(parts[0]) if len(parts) == 1 else None
            return index + 1, _numbers(int(bounds[1]), int(bounds[2])) if bounds else parts
        index = past(word, index) if one in "\\$`'\"" else index + 1
    return index, []


def _numbers(first: int, last: int) -> list[str]:
    if abs(last - first) >= _MOST_WORDS:
        raise UserError("a word of the script expands to too many words")
    return [str(number) for number in (range(first, last + 1) if first <= last else range(first, last - 1, -1))]


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
