"""The syntax of shell scripts: a text becomes a tree of commands. Nothing is run, and no word is expanded yet."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megarl.platform.errors import UserError

_OPERATOR = re.compile(r"&&|\|\||;;&?|\n|[;&|()]")
_REDIRECT = re.compile(r"\d*(?:<<<|<<-?|>>|>&|<&|&>>?|>\||<>|>|<)")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[(?P<index>[^\]]*)\])?(?P<append>\+?)=")
_WITH_ESCAPES = re.compile(r"\$'(?:[^'\\]|\\.)*+'", re.DOTALL)
_SKIPPED = re.compile(r"(?:[ \t\r]|\\\n|#[^\n]*)*+")
_ENDS = " \t\r\n;&|()<>"
_QUOTES = {'"': "\\$`", "`": "\\"}
"""Quotes -> the characters that begin a quoting or an expansion within them; elsewhere there are more."""


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


class Token(NamedTuple):
    """A word, an operator, or the beginning of an array with its items."""

    line: int
    kind: Literal["word", "operator", "redirect", "end"]
    text: str
    items: tuple[str, ...] | None = None  # of an array
    document: Document | None = None  # of `<<`


class Assigned(NamedTuple):
    """`NAME=word`, `NAME[place]=word`, `NAME+=word`, or an array instead of a word."""

    name: str
    place: str | None
    append: bool
    words: tuple[str, ...]
    is_array: bool


@dataclass(frozen=True)
class Simple:
    """A command of words, or assignments alone."""

    line: int
    words: list[str] = field(default_factory=list)
    assigned: list[Assigned] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)  # that it reads
    files: list[str] = field(default_factory=list)  # that it writes


class Branches(NamedTuple):
    """`if`, `elif` and `else`: conditions and their bodies."""

    arms: list[tuple["Chain", "Chain"]]
    otherwise: "Chain"


class Looped(NamedTuple):
    """`while`: a condition and a body. `until` is the loop of the negated condition."""

    condition: "Chain"
    body: "Chain"


class Repeated(NamedTuple):
    """`for NAME in words`."""

    name: str
    words: list[str] | None  # None: the arguments
    body: "Chain"


class Choice(NamedTuple):
    """`case word in patterns) ...`."""

    word: str
    arms: list[tuple[list[str], "Chain"]]


class Defined(NamedTuple):
    """A function."""

    name: str
    body: "Chain"


class Negated(NamedTuple):
    """`! command`."""

    command: "Node"


Node = Simple | Branches | Looped | Repeated | Choice | Defined | Negated | list[tuple[str, "Node"]]
"""A command."""
Chain = list[tuple[str, Node]]
"""Commands, each after the operator before it: `&&`, `||`, `|`, or `;` for all others."""


def past(text: str, start: int) -> int:
    """Return the index behind the quoting, the expansion or the ordinary character that begins at `start`."""
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
        is_letter = one not in _QUOTES.get(closing, one) or (closing == '"' and text.startswith("$'", index))
        index = index + 1 if is_letter else past(text, index)
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
        skipped = _SKIPPED.match(self.text, self.index)
        self._take(skipped.end() if skipped else self.index)
        return self.index < len(self.text)

    def _take(self, end: int) -> str:
        """Return the text up to an index, and move there."""
        taken = self.text[self.index : end]
        self.line += taken.count("\n")
        self.index = min(end, len(self.text))
        return taken

    def _next(self) -> Token:
        text = self.text
        if text.startswith("((", self.index):
            return Token(self.line, "word", self._take(_past_pair(text, self.index + 1, "(", ")")))
        redirect = _REDIRECT.match(text, self.index)
        if redirect:
            token = Token(self.line, "redirect", self._take(redirect.end()))
            return token._replace(document=self._document(token.text)) if "<<" in token.text else token
        operator = _OPERATOR.match(text, self.index)
        if operator:
            token = Token(self.line, "operator", self._take(operator.end()))
            if token.text == "\n":
                self._read_documents()
            return token
        assigned = _ASSIGNED.match(text, self.index)
        if assigned and text.startswith("(", assigned.end()):
            line = self.line
            self._take(assigned.end() + 1)
            return Token(line, "word", assigned[0], tuple(self._items()))
        return Token(self.line, "word", self._word())

    def _word(self) -> str:
        index = self.index
        while index < len(self.text) and self.text[index] not in _ENDS:
            index = past(self.text, index)
        return self._take(max(index, self.index + 1))

    def _items(self) -> Iterator[str]:
        """Yield the words of an array."""
        while self._skip_blanks():
            if self.text[self.index] not in "\n)":
                yield self._word()
            elif self._take(self.index + 1) == ")":
                return
        _found(-1)

    def _document(self, operator: str) -> Document:
        """Return the word of a here-string, or a here-document, whose lines follow the line."""
        self._skip_blanks()
        word = self._word()
        if operator.endswith("<<<"):
            return Document([word], is_word=True)
        delimiter = re.sub(r"['\"\\]", "", word)
        document = Document([], is_quoted=delimiter != word)
        self.waiting.append((delimiter, operator.endswith("-"), document))
        return document

    def _read_documents(self) -> None:
        for delimiter, without_tabs, document in self.waiting:
            while self.index < len(self.text):
                end = self.text.find("\n", self.index) + 1
                row = self._take(end or len(self.text)).removesuffix("\n")
                if row.strip() == delimiter:
                    break
                document.lines.append(f"{row.lstrip(chr(9)) if without_tabs else row}\n")
        self.waiting.clear()


class _CommandParser:
    """Makes commands of tokens."""

    def __init__(self, tokens: Iterator[Token]) -> None:
        end = Token(0, "end", "")
        self.tokens = [*tokens, end, end]
        self.index = 0

    @property
    def next(self) -> Token:
        """The next token."""
        return self.tokens[self.index]

    def chain(self, *ends: str) -> Chain:
        """Return the commands before one of the words `ends`; without one, those before the end of the text."""
        commands: Chain = []
        operator = ";"
        while self.next.kind != "end":
            text = self.next.text
            if text in ends:
                return commands
            if self.next.kind != "operator" or text in "()":
                commands.append((operator, self.command()))
                operator = ";"
                continue
            if text != "\n" or operator not in ("&&", "||"):
                operator = text if text in ("&&", "||", "|") else ";"
            self.index += 1
        if ends:
            raise UserError(f"{' or '.join(ends)} is missing")
        return commands

    def command(self) -> Node:
        """Return the next command."""
        match self._take():
            case "if":
                return self._if()
            case "for":
                return self._for()
            case "while":
                return Looped(self._until("do"), self._until("done"))
            case "until":
                return Looped([(";", Negated(self._until("do")))], self._until("done"))
            case "case":
                return self._case()
            case "{":
                return self._until("}")
            case "(":
                return self._until(")")
            case "!":
                return Negated(self.command())
            case "function":
                return self._function(self._take())
            case name if [token.text for token in self.tokens[self.index : self.index + 2]] == ["(", ")"]:
                return self._function(name)
        self.index -= 1
        return self._simple()

    def _take(self) -> str:
        if self.next.kind == "end":
            raise UserError("the script ends within a command")
        self.index += 1
        return self.tokens[self.index - 1].text

    def _take_until(self, end: str) -> list[str]:
        """Return the words before a word, which is read too."""
        words = []
        while self.next.text != end:
            words.append(self._take())
        self._take()
        return words

    def _until(self, end: str) -> Chain:
        commands = self.chain(end)
        self._take()
        return commands

    def _function(self, name: str) -> Defined:
        while self.next.text in ("(", ")", "\n"):
            self._take()
        body = self.command()
        return Defined(name, body if isinstance(body, list) else [(";", body)])

    def _if(self) -> Branches:
        arms: list[tuple[Chain, Chain]] = []
        word = "elif"
        while word == "elif":
            condition = self._until("then")
            arms.append((condition, self.chain("elif", "else", "fi")))
            word = self._take()
        return Branches(arms, self._until("fi") if word == "else" else [])

    def _for(self) -> Repeated | Chain:
        name = self._take()
        if name.startswith("(("):
            return self._counted(name[2:-2])
        words: list[str] | None = None
        if self.next.text == "in":
            self._take()
            words = []
            while self.next.text not in ("\n", ";"):
                words.append(self._take())
        self._take_until("do")
        return Repeated(name, words, self._until("done"))

    def _counted(self, parts: str) -> Chain:
        """Return `for ((first; condition; step))` as the first assignment and a loop."""
        line = self.tokens[self.index - 1].line
        first, condition, step = (Simple(line, [f"(({part}))"]) for part in f"{parts};;".split(";")[:3])
        self._take_until("do")
        body: Chain = [*self._until("done"), (";", step)]
        return [(";", first), (";", Looped([(";", condition)], body))]

    def _case(self) -> Choice:
        word = self._take()
        self._take_until("in")
        arms: list[tuple[list[str], Chain]] = []
        while True:
            while self.next.text in ("\n", ";"):
                self._take()
            if self.next.text == "esac":
                self._take()
                return Choice(word, arms)
            patterns = [pattern for pattern in self._take_until(")") if pattern not in "|("]
            arms.append((patterns, self.chain(";;", ";;&", "esac")))
            if self.next.text != "esac":
                self._take()

    def _simple(self) -> Simple:
        command = Simple(self.next.line)
        conditional = False  # within [[ ]], whose operators are words
        while self.next.kind != "end" and (self.next.kind != "operator" or conditional):
            token = self.next
            self.index += 1
            may_assign = token.items is not None or not command.words
            assigned = assignment(token.text, token.items) if may_assign else None
            if token.kind == "redirect" and not conditional:
                self._redirect(command, token)
            elif assigned:
                command.assigned.append(assigned)
            else:
                conditional = (conditional or (not command.words and token.text == "[[")) and token.text != "]]"
                command.words.append(token.text)
        if not command.words and not command.assigned:
            self.index += self.next.text == ")"  # of nothing
        return command

    def _redirect(self, command: Simple, token: Token) -> None:
        """Note what a command reads and writes, and read the word of its redirection."""
        if token.document:
            command.documents.append(token.document)
        elif self.next.kind == "word":
            word = self._take()
            if token.text in (">", ">>", ">|"):
                command.files.append(word)


def assignment(text: str, items: tuple[str, ...] | None = None) -> Assigned | None:
    """Return a word that begins as an assignment, or the beginning of an array with its items; None for another."""
    match = _ASSIGNED.match(text)
    if not match:
        return None
    words = (text[match.end() :],) if items is None else items
    return Assigned(match["name"], match["index"], bool(match["append"]), words, items is not None)


def parse_script(text: str) -> Chain:
    """Return the commands of a script.

    Raises:
        UserError: it is no shell script, as far as can be told without a shell.
    """
    try:
        return _CommandParser(_Lexer(text).tokens()).chain()
    except RecursionError as error:
        raise UserError("its commands are nested too deeply") from error
