"""The programs of a shell script, with their arguments. None of them is run.

Variables, arrays, functions, loops, here-documents and conditions on texts and numbers are followed. A condition on a
file or on another program counts as not met. `exit` ends its branch alone, so that a check of the usage ends nothing.
A loop ends when a round changes no variable.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from megarl.commands.convert.expand import UNKNOWN, Expander, Variable, matches, without_marks
from megarl.commands.convert.shell_builtins import PRINTERS, READERS, read_into
from megarl.commands.convert.shell_syntax import (
    Branches,
    Chain,
    Choice,
    Defined,
    Looped,
    Negated,
    Node,
    Repeated,
    Simple,
    assignment,
    parse_script,
)
from megarl.platform.errors import UserError

_MOST_COMMANDS = 20_000
_MOST_CALLS = 40
_MOST_ROUNDS = 100
_SHELLS = ("bash", "sh", "zsh", "dash")
_STARTERS = (*_SHELLS, "sbatch", "source", ".")
"""Programs that run the script which an argument names, or which they read."""
_DECLARES = ("export", "declare", "local", "typeset", "readonly")
_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_FILES = re.compile(r"-[a-eghkprstuwxGLNOS]")
Outcome = bool | None
"""Whether a command succeeds; None: nobody knows, as of a program that was not run."""
_COMBINED: Mapping[str, Outcome] = {"||": True, "-o": True, "&&": False, "-a": False}
"""An operator between two conditions -> the outcome of one that decides."""


class _BranchEnd(Exception):  # noqa: N818 - it is no error
    """Ends the branch in which `exit` or `return` stands."""


class _RoundEnd(Exception):  # noqa: N818 - it is no error
    """Ends the round of a loop; `break` also ends the loop."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last


@dataclass(frozen=True)
class Program:
    """A program that the script would run."""

    line: int
    words: tuple[str, ...]


@dataclass(kw_only=True)
class Shell:
    """Follows a script."""

    arguments: list[str]
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Chain] = field(default_factory=dict)
    commands: list[Program] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # that here-documents fill, by name
    printed: list[str] | None = None  # of a command whose output a word takes
    calls: int = 0
    count: list[int] = field(default_factory=lambda: [0])  # of all commands, shared with those of a substitution

    @cached_property
    def expander(self) -> Expander:
        """Expands words from the variables and the arguments as they are when it is asked."""
        return Expander(self.variables, self.arguments, self._substitute)

    def follow(self, chain: Chain) -> Outcome:
        """Follow commands; return how the last one ends."""
        status: Outcome = True
        for operator, node in chain:
            is_met = self.printed is None if status is None else status
            if operator == ("||" if is_met else "&&"):
                continue
            if operator == "|" and self.printed is not None:
                self._pipe(node)
            else:
                status = self._follow_one(node)
        return status

    def _follow_one(self, node: Node) -> Outcome:
        self.count[0] += 1
        if self.count[0] > _MOST_COMMANDS:
            raise UserError("the script has too many commands, or a loop without an end")
        match node:
            case Simple():
                return self._run(node)
            case list():
                return self.follow(node)
            case Negated():
                status = self._follow_one(node.command)
                return None if status is None else not status
            case Defined():
                self.functions[node.name] = node.body
            case Branches():
                return self._branch(node)
            case Repeated():
                self._repeat(node)
            case Looped():
                self._loop(node)
            case Choice():
                self._choose(node)
        return True

    def _body(self, chain: Chain) -> Outcome:
        try:
            return self.follow(chain)
        except _BranchEnd:
            return True

    def _whole(self, chain: Chain) -> Outcome:
        """Follow the commands of a script or of a function."""
        try:
            return self._body(chain)
        except _RoundEnd:  # outside of a loop
            return True

    def _round(self, chain: Chain) -> bool:
        """Follow the body of a loop; return whether another round may follow."""
        try:
            self._body(chain)
        except _RoundEnd as end:
            return not end.is_last
        return True

    def _repeat(self, node: Repeated) -> None:
        words = list(self.arguments)
        if node.words is not None:
            words = [one for word in node.words for one in self.expander.fields(word)]
        for word in words:
            self.variables[node.name] = word
            if not self._round(node.body):
                return

    def _loop(self, node: Looped) -> None:
        for _ in range(_MOST_ROUNDS):
            before = dict(self.variables), list(self.arguments)
            if not self.follow(node.condition):
                return
            changes = self._round(node.body) and before != (self.variables, self.arguments)
            if not changes or self.count[0] > _MOST_COMMANDS // 2:
                return

    def _pipe(self, node: Node) -> None:
        """Let a program change what was printed: the calculator is known, and no other one."""
        is_sum = isinstance(node, Simple) and node.words[:1] == ["bc"]
        self.printed = [self.expander.arithmetic(self.printed[-1])] if is_sum and self.printed else [UNKNOWN]

    def _branch(self, node: Branches) -> Outcome:
        return self._body(next((body for condition, body in node.arms if self.follow(condition)), node.otherwise))

    def _choose(self, node: Choice) -> None:
        word = without_marks(self.expander.text(node.word))
        for patterns, body in node.arms:
            if UNKNOWN not in word and any(matches(word, self.expander.text(pattern)) for pattern in patterns):
                self._body(body)
                return

    def _inner(self, **changes: Any) -> "Shell":
        """Return a further shell, which changes no variable of this one."""
        if self.calls > _MOST_CALLS:
            raise UserError("a shell of the script starts itself, or a command has its own output in it")
        variables = dict(self.variables)
        functions = dict(self.functions)
        return replace(self, variables=variables, functions=functions, commands=[], calls=self.calls + 1, **changes)

    def _substitute(self, text: str) -> str:
        """Return what a command prints, if it only prints texts that are known."""
        inner = self._inner(printed=[])
        inner._whole(parse_script(text))
        return "\n".join(inner.printed or [UNKNOWN])

    def _run(self, command: Simple) -> Outcome:
        first = command.words[0] if command.words else "export"
        if first.startswith("(("):
            return self._test_number(first[2:-2])
        if first == "[[":
            return self._test([self.expander.text(word) for word in command.words[1:-1]])
        if first in _DECLARES:
            self._declare(command)
            return True
        words = [one for word in command.words for one in self.expander.fields(word)]
        given = [self.expander.document(document) for document in command.documents][-1:]
        if given and self._take_document(command, words, given[0]):
            return None
        return self._call(words, command.line) if words else True

    def _declare(self, command: Simple) -> None:
        for one in command.assigned:
            self.expander.assign(one)
        options = "".join(word for word in command.words[1:] if word.startswith("-"))
        for word in command.words[1:]:
            assigned = assignment(word)
            if assigned:
                self.expander.assign(assigned)
            elif "A" in options and word.isidentifier():
                self.variables.setdefault(word, {})

    def _take_document(self, command: Simple, words: list[str], text: str) -> bool:
        """Give a here-document to the command that reads it; return whether the command is known."""
        name, *rest = words
        starter = _place_of(_STARTERS, words)
        if name in READERS:
            given = [self.expander.text(one.words[0]) for one in command.assigned if one.name == "IFS"]
            self.variables |= read_into(name, rest, text, given[0] if given else " \t\n")
        elif name == "cat" and command.files:
            self.files[self.expander.text(command.files[-1])] = text
        elif name == "cat" and self.printed is not None:
            self.printed.append(text.rstrip("\n"))
        elif starter < len(words) and not _script_of(words):
            self._follow_inner(text, words[starter + 1 + len(_options(words[starter + 1 :])) :], command.line)
        else:
            return False
        return True

    def _call(self, words: list[str], line: int) -> Outcome:
        """Follow a builtin or a function, or record a program."""
        name, *rest = words
        if name in self.functions:
            return self._call_function(name, rest)
        match name:
            case "exit" | "return" | "exec" if name != "exec" or not rest:
                raise _BranchEnd
            case "break" | "continue":
                raise _RoundEnd(is_last=name == "break")
            case "[" | "test":
                return self._test(rest[:-1] if name == "[" else rest)
            case "set" | "shift" | "unset":
                self._change(name, rest)
            case "true" | ":" | "shopt" | "trap" | "wait" | "cd" | "ulimit" | "umask":
                pass
            case "let":
                return [self._test_number(one) for one in rest][-1] if rest else False
            case "false":
                return False
            case "eval" | "exec" | "time":
                return self.follow(parse_script(" ".join(rest))) if name == "eval" else self._call(rest, line)
            case _:
                inner = _script_of(words) or self._written_script(words)
                return self._follow_inner(*inner, line) if inner else self._record(name, rest, line)
        return True

    def _change(self, name: str, rest: Sequence[str]) -> None:
        """Change the arguments or the variables as a builtin does."""
        if name == "unset":
            for one in rest:
                self.variables.pop(one, None)
        elif name == "shift":
            is_counted = rest and re.fullmatch("[0-9]{1,9}", rest[0])
            del self.arguments[: int(rest[0]) if is_counted else 1]
        elif rest[:1] == ["--"]:
            self.arguments[:] = rest[1:]

    def _follow_inner(self, text: str, arguments: Sequence[str], line: int) -> Outcome:
        """Follow the script of a further shell."""
        inner = self._inner(arguments=list(arguments))
        try:
            chain = parse_script(text)
        except UserError:
            return None  # only that shell can tell
        inner._whole(chain)
        self.commands += [replace(one, line=line + one.line - 1) for one in inner.commands]
        return None

    def _written_script(self, words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
        """Return the script among the words that a here-document has written, and its arguments."""
        known = {name.removeprefix("./"): text for name, text in self.files.items()}
        for at, word in enumerate(words):
            if word.removeprefix("./") in known and (not at or words[0] in _STARTERS or words[at - 1] in _STARTERS):
                return known[word.removeprefix("./")], words[at + 1 :]
        return None

    def _call_function(self, name: str, rest: list[str]) -> Outcome:
        if self.calls > _MOST_CALLS:
            raise UserError(f"the script's function {name} calls itself")
        outer = list(self.arguments)
        self.arguments[:] = rest
        self.calls += 1
        try:
            return self._whole(self.functions[name])
        finally:
            self.calls -= 1
            self.arguments[:] = outer

    def _record(self, name: str, rest: Sequence[str], line: int) -> Outcome:
        if self.printed is None or name not in PRINTERS:
            self.commands.append(Program(line, (name, *rest)))
            return True if name in ("echo", "printf") else None
        self.printed.append(PRINTERS[name](rest))
        return True

    def _test(self, words: list[str]) -> Outcome:
        """Return whether a condition of `[` or `[[` holds."""
        for operator, deciding in _COMBINED.items():
            if operator in words[1:]:
                at = words.index(operator, 1)
                both = self._test(words[:at]), self._test(words[at + 1 :])
                if deciding in both:
                    return deciding
                return None if None in both else not deciding
        if words[:1] == ["!"]:
            status = self._test(words[1:])
            return None if status is None else not status
        words = [word for word in words if word not in ("(", ")", "\n")]
        if any(UNKNOWN in word for word in words) or (len(words) == 2 and _FILES.fullmatch(words[0])):
            return None
        return self._compare([without_marks(word) for word in words])

    def _compare(self, words: list[str]) -> Outcome:
        match words:
            case ["-z", word]:
                return not word
            case ["-n", word] | [word]:
                return bool(word)
            case ["-v", name]:
                return name in self.variables
            case [left, "=" | "==", right]:
                return matches(left, right)
            case [left, "!=", right]:
                return not matches(left, right)
            case [left, sign, right] if sign in _NUMBERS:
                return self._test_number(f"{left or 0} {_NUMBERS[sign]} {right or 0}")
        return None

    def _test_number(self, expression: str) -> Outcome:
        value = self.expander.arithmetic(expression)
        return None if value == UNKNOWN else value != "0"


def _place_of(programs: Collection[str], words: Sequence[str]) -> int:
    """Return the place of the first of some programs among words; behind them without one."""
    return next((at for at, word in enumerate(words) if word.rpartition("/")[2] in programs), len(words))


def _options(words: Sequence[str]) -> list[str]:
    return list(takewhile(lambda word: word.startswith("-"), words))


def _script_of(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return the script that a shell among the words gets after `-c`, and its arguments."""
    start = _place_of(_SHELLS, words) + 1
    options = _options(words[start:])
    script = start + len(options)
    takes_script = any("c" in option and not option.startswith("--") for option in options)
    if not takes_script or script >= len(words):
        return None
    return words[script], words[script + 2 :]


def follow_script(text: str, arguments: Sequence[str] = (), variables: Sequence[tuple[str, str]] = ()) -> list[Program]:
    """Return the programs that a script would run with `arguments` and `variables`, in their order.

    Raises:
        UserError: the text cannot be read as a script.
    """
    plain = re.sub("[\ue000-\ue00f]", "", text.replace("\r\n", "\n"))
    shell = Shell(arguments=list(arguments), variables=dict(variables))
    try:
        shell._whole(parse_script(plain))
    except RecursionError as error:
        raise UserError("its commands are nested too deeply") from error
    return shell.commands
