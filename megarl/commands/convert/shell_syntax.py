"""The syntax of shell scripts: a text becomes a tree of commands. Nothing is run, and no word is expanded yet."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from megarl.platform.errors import UserError

_OPERATOR = re.compile(r"&&|\|\||;;&?|\n|[;&|()]")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|&>>?|>\||<>|>|<)")
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[(?P<index>[^\]]*)\])?(?P<append>\+?)=")
_WITH_ESCAPES = re.compile(r"\$'(?:[^'\\]|\\.)*+'", re.DOTALL)
_BLANKS = " \t\r"
_ENDS = _BLANKS + "\n;&|()<>"
_QUOTES = {'"': "\\$`", "`": "\\"}
"""What begins a quoting or an expansion within these quotes; elsewhere more does."""
_CLOSING = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Document:
    """The lines of a here-document, which the lexer finds after the command; or the word of a here-string."""

    lines: list[str]
    is_quoted: bool = False  # no variable in it is expanded
    is_word: bool = False

    @property
    def text(self) -> str:
        """The text, before variables are expanded."""
        return "".join(self.lines)


@dataclass(frozen=True)
class Token:
    """A word, an operator or an array, with its line."""

    kind: Literal["word", "operator", "redirect", "array"]
    text: str
    line: int
    items: tuple[str, ...] = ()  # of an array
    document: Document | None = None  # of `<<`


@dataclass(frozen=True, kw_only=True)
class Assigned:
    """`NAME=word`, `NAME[index]=word`, `NAME+=word`, or an array instead of a word."""

    name: str
    append: bool
    words: tuple[str, ...]
    is_array: bool
    index: str | None = None


@dataclass(frozen=True, kw_only=True)
class Simple:
    """A command of words, or assignments alone."""

    line: int
    assigned: list[Assigned] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)  # that it reads
    files: list[str] = field(default_factory=list)  # that it writes


@dataclass(frozen=True, kw_only=True)
class Branches:
    """`if`, `elif` and `else`: conditions and their bodies."""

    arms: list[tuple["Chain", "Chain"]]
    otherwise: "Chain"


@dataclass(frozen=True, kw_only=True)
class Looped:
    """`while` or `until`: a condition and a body."""

    condition: "Chain"
    body: "Chain"
    is_until: bool


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """`for NAME in words`."""

    name: str
    words: list[str] | None  # None: the arguments
    body: "Chain"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`case word in patterns) ...`."""

    word: str
    arms: list[tuple[list[str], "Chain"]]


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A function."""

    name: str
    body: "Chain"


@dataclass(frozen=True, kw_only=True)
class Negated:
    """`! command`."""

    command: "Node"


Node = Simple | Branches | Looped | Repeated | Choice | Defined | Negated | list[tuple[str, "Node"]]
"""A command."""
Chain = list[tuple[str, Node]]
"""Commands, each after the operator before it: `&&`, `||`, `|`, or `;` for all others."""


def past(text: str, start: int) -> int:
    """Return the index behind the quoting or expansion that begins at `start`."""
    first = text[start]
    if first == "\\":
        return start + 2
    if first == "'":
        return _found(text.find("'", start + 1)) + 1
    if text.startswith("$'", start):
        quoted = _WITH_ESCAPES.match(text, start)
        return quoted.end() if quoted else _found(-1)
    if first in '"`':
        return _past_pair(text, start + 1, "", first)
    for opening, closing in (("$(", ")"), ("${", "}")):
        if text.startswith(opening, start):
            return _past_pair(text, start + 2, opening[1], closing)
    return start + 1


def _past_pair(text: str, start: int, opening: str, closing: str) -> int:
    """Return the index behind the `closing` that belongs to an opening before `start`."""
    depth = 1
    index = start
    while index < len(text):
        one = text[index]
        if one == closing:
            depth -= 1
            if not depth:
                return index + 1
        elif one == opening:
            depth += 1
        is_letter = closing == '"' and text.startswith("$'", index)
        index = past(text, index) if one in _QUOTES.get(closing, "\\$`'\"") and not is_letter else index + 1
    return _found(-1)


def _found(index: int) -> int:
    if index < 0:
        raise UserError("a quote or a bracket is never closed")
    return index


class _Lexer:
    """Cuts a text into tokens."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.index = 0
        self.line = 1
        self.waiting: list[tuple[str, bool, Document]] = []  # delimiters of here-documents; whether tabs are taken off

    def tokens(self) -> Iterator[Token]:
        while self._skip_blanks():
            yield self._next()

    def _skip_blanks(self) -> bool:
        """Move to the next token; return whether there is one."""
        text = self.text
        while self.index < len(text):
            if text[self.index] in _BLANKS:
                self._move(self.index + 1)
            elif text.startswith("\\\n", self.index):
                self._move(self.index + 2)
            elif text[self.index] == "#":
                end = text.find("\n", self.index)
                self._move(end if end >= 0 else len(text))
            else:
                return True
        return False

    def _move(self, index: int) -> None:
        self.line += self.text.count("\n", self.index, index)
        self.index = index

    def _next(self) -> Token:
        line = self.line
        text = self.text
        if text.startswith("((", self.index):
            end = _past_pair(text, self.index + 1, "(", ")")
            return self._token("word", end, line)
        redirect = _REDIRECT.match(text, self.index)
        if redirect:
            token = self._token("redirect", redirect.end(), line)
            if "<<" not in token.text:
                return token
            self._skip_blanks()
            start = self.index
            self._move(self._word_end())
            word = text[start : self.index]
            if token.text.endswith("<<<"):
                return replace(token, document=Document([word], is_word=True))
            delimiter = re.sub(r"['\"\\]", "", word)
            document = Document([], is_quoted=delimiter != word)
            self.waiting.append((delimiter, token.text.endswith("-"), document))
            return replace(token, document=document)
        operator = _OPERATOR.match(text, self.index)
        if operator:
            token = self._token("operator", operator.end(), line)
            if token.text == "\n":
                self._read_documents()
            return token
        assigned = ASSIGNED.match(text, self.index)
        if assigned and text.startswith("(", assigned.end()):
            self._move(assigned.end() + 1)
            return Token("array", assigned[0], line, tuple(self._items()))
        return self._token("word", self._word_end(), line)

    def _token(self, kind: Literal["word", "operator", "redirect"], end: int, line: int) -> Token:
        token = Token(kind, self.text[self.index : end], line)
        self._move(end)
        return token

    def _word_end(self) -> int:
        index = self.index
        while index < len(self.text) and self.text[index] not in _ENDS:
            index = past(self.text, index) if self.text[index] in "\\$`'\"" else index + 1
        return min(max(index, self.index + 1), len(self.text))

    def _items(self) -> Iterator[str]:
        """Yield the words of an array."""
        while self._skip_blanks():
            if self.text[self.index] == "\n":
                self._move(self.index + 1)
            elif self.text[self.index] == ")":
                self._move(self.index + 1)
                return
            else:
                start = self.index
                self._move(self._word_end())
                yield self.text[start : self.index]
        _found(-1)

    def _read_documents(self) -> None:
        for delimiter, without_tabs, document in self.waiting:
            while self.index < len(self.text):
                end = self.text.find("\n", self.index)
                end = end if end >= 0 else len(self.text)
                row = self.text[self.index : end]
                self._move(min(end + 1, len(self.text)))
                if row.strip() == delimiter:
                    break
                document.lines.append(f"{row.lstrip(chr(9)) if without_tabs else row}\n")
        self.waiting.clear()


class _CommandParser:
    """Makes commands of tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.index = 0

    def chain(self, *ends: str) -> Chain:
        """Return the commands before one of the words `ends`, which is read too; at the end of the text without one."""
        commands: Chain = []
        operator = ";"
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            if token.text in ends and token.kind != "array":
                return commands
            if token.kind == "operator" and token.text not in "()":
                operator = token.text if token.text in ("&&", "||", "|") else ";"
                if token.text == "\n" and commands and self.index and self.tokens[self.index - 1].text in ("&&", "||"):
                    operator = self.tokens[self.index - 1].text
                self.index += 1
                continue
            commands.append((operator, self.command()))
            operator = ";"
        if ends:
            raise UserError(f"{' or '.join(ends)} is missing")
        return commands

    def command(self) -> Node:
        """Return the next command."""
        token = self.tokens[self.index]
        self.index += 1
        makers: dict[str, Callable[[], Node]] = {
            "if": self._if,
            "for": self._for,
            "while": lambda: self._while(is_until=False),
            "until": lambda: self._while(is_until=True),
            "case": self._case,
        }
        if token.kind == "word" and token.text in makers:
            return makers[token.text]()
        if token.text in ("{", "(") and token.kind in ("word", "operator"):
            return self._until(_CLOSING[token.text])
        if token.kind == "word" and token.text == "!":
            return Negated(command=self.command())
        if token.kind == "word" and token.text == "function":
            name = self._take()
            return self._function(name)
        if token.kind == "word" and self._peek("(") and self._peek(")", 1):
            return self._function(token.text)
        self.index -= 1
        return self._simple()

    def _peek(self, text: str, ahead: int = 0) -> bool:
        index = self.index + ahead
        return index < len(self.tokens) and self.tokens[index].text == text

    def _take(self) -> str:
        if self.index >= len(self.tokens):
            raise UserError("the script ends within a command")
        self.index += 1
        return self.tokens[self.index - 1].text

    def _until(self, end: str) -> Chain:
        commands = self.chain(end)
        self._take()
        return commands

    def _function(self, name: str) -> Defined:
        while self._peek("(") or self._peek(")") or self._peek("\n"):
            self._take()
        body = self.command()
        return Defined(name=name, body=body if isinstance(body, list) else [(";", body)])

    def _if(self) -> Branches:
        arms: list[tuple[Chain, Chain]] = []
        otherwise: Chain = []
        while True:
            condition = self._until("then")
            arms.append((condition, self.chain("elif", "else", "fi")))
            word = self._take()
            if word == "else":
                otherwise = self._until("fi")
            if word != "elif":
                return Branches(arms=arms, otherwise=otherwise)

    def _while(self, *, is_until: bool) -> Looped:
        condition = self._until("do")
        return Looped(condition=condition, body=self._until("done"), is_until=is_until)

    def _for(self) -> Repeated | Chain:
        name = self._take()
        if name.startswith("(("):
            return self._counted(name[2:-2])
        words: list[str] | None = None
        if self._peek("in"):
            self._take()
            words = []
            while not (self._peek("\n") or self._peek(";")):
                words.append(self._take())
        while not self._peek("do"):
            self._take()
        self._take()
        return Repeated(name=name, words=words, body=self._until("done"))

    def _counted(self, parts: str) -> Chain:
        """Return `for ((first; condition; step))` as the first assignment and a loop."""
        line = self.tokens[self.index - 1].line
        first, condition, step = (Simple(line=line, words=[f"(({part}))"]) for part in f"{parts};;".split(";")[:3])
        while not self._peek("do"):
            self._take()
        self._take()
        body: Chain = [*self._until("done"), (";", step)]
        return [(";", first), (";", Looped(condition=[(";", condition)], body=body, is_until=False))]

    def _case(self) -> Choice:
        word = self._take()
        while not self._peek("in"):
            self._take()
        self._take()
        arms: list[tuple[list[str], Chain]] = []
        while True:
            while self._peek("\n") or self._peek(";"):
                self._take()
            if self._peek("esac"):
                self._take()
                return Choice(word=word, arms=arms)
            patterns = []
            while not self._peek(")"):
                patterns.append(self._take())
            self._take()
            body = self.chain(";;", ";;&", "esac")
            arms.append(([pattern for pattern in patterns if pattern not in "|("], body))
            if not self._peek("esac"):
                self._take()

    def _simple(self) -> Simple:
        command = Simple(line=self.tokens[self.index].line)
        conditional = False  # within [[ ]], whose operators are words
        while self.index < len(self.tokens):
            token = self.tokens[self.index]
            if token.kind == "operator" and not conditional:
                break
            self.index += 1
            if token.kind == "redirect" and not conditional:
                self._redirect(command, token)
            elif token.kind == "array":
                command.assigned.append(assignment(token.text, token.items, is_array=True))
            elif not command.words and token.kind == "word" and ASSIGNED.match(token.text):
                command.assigned.append(assignment_of(token.text))
            else:
                conditional = (conditional or (not command.words and token.text == "[[")) and token.text != "]]"
                command.words.append(token.text)
        if not command.words and not command.assigned and self.index < len(self.tokens):
            self.index += self.tokens[self.index].text == ")"  # of nothing
        return command

    def _redirect(self, command: Simple, token: Token) -> None:
        """Note what a command reads and writes, and read the word of its redirection."""
        if token.document:
            command.documents.append(token.document)
        elif self.index < len(self.tokens) and self.tokens[self.index].kind == "word":
            if token.text in (">", ">>", ">|"):
                command.files.append(self.tokens[self.index].text)
            self.index += 1


def assignment_of(word: str) -> Assigned:
    """Return a word that begins as an assignment as such."""
    match = ASSIGNED.match(word)
    assert match
    return assignment(match[0], (word[match.end() :],), is_array=False)


def assignment(target: str, words: tuple[str, ...], *, is_array: bool) -> Assigned:
    """Return an assignment of `words` to a target, which ends with its sign."""
    match = ASSIGNED.match(target)
    assert match
    return Assigned(
        name=match["name"], append=bool(match["append"]), words=words, is_array=is_array, index=match["index"]
    )


def parse_script(text: str) -> Chain:
    """Return the commands of a script.

    Raises:
        UserError: it is no shell script, as far as can be told without a shell.
    """
    try:
        return _CommandParser(list(_Lexer(text).tokens())).chain()
    except RecursionError as error:
        raise UserError("its commands are nested too deeply") from error
