"""The programs of a shell script, with their arguments. None of them is run.

Variables, arrays, functions, loops, here-documents and conditions on texts and numbers are followed. A condition on a
file or on another program counts as not met. `exit` ends its branch alone, so that a check of the usage ends nothing.
A loop ends when a round changes no variable.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile

from megarl.commands.convert.expand import UNKNOWN, Expander, Variable, matches, without_marks
from megarl.commands.convert.shell_builtins import READERS, directory_of, numbers, read_into, without_directory
from megarl.commands.convert.shell_syntax import (
    ASSIGNED,
    Branches,
    Chain,
    Choice,
    Defined,
    Looped,
    Negated,
    Node,
    Repeated,
    Simple,
    assignment_of,
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


class Outcome(Enum):
    """How a command ends; nobody knows of a program that was not run."""

    MET = True
    FAILED = False
    UNKNOWN = None

    @classmethod
    def of(cls, is_met: bool) -> "Outcome":
        """Return the status of a condition."""
        return cls.MET if is_met else cls.FAILED

    def negated(self) -> "Outcome":
        """Return the status of `!` before a command."""
        return self if self is Outcome.UNKNOWN else Outcome.of(self is Outcome.FAILED)


_COMBINED = {"||": Outcome.MET, "-o": Outcome.MET, "&&": Outcome.FAILED, "-a": Outcome.FAILED}
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

    def follow(self, chain: Chain) -> Outcome:
        """Follow commands; return how the last one ends."""
        status = Outcome.MET
        for operator, node in chain:
            if operator == "&&" and (
                status is Outcome.FAILED or (status is Outcome.UNKNOWN and self.printed is not None)
            ):
                continue
            if operator == "|" and self.printed is not None:
                self._pipe(node)
                continue
            if operator == "||" and (status is Outcome.MET or (status is Outcome.UNKNOWN and self.printed is None)):
                continue
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
                return self._follow_one(node.command).negated()
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
        return Outcome.MET

    def _body(self, chain: Chain) -> Outcome:
        try:
            return self.follow(chain)
        except _BranchEnd:
            return Outcome.MET

    def _whole(self, chain: Chain) -> Outcome:
        """Follow the commands of a script or of a function."""
        try:
            return self._body(chain)
        except _RoundEnd:  # outside of a loop
            return Outcome.MET

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
            words = [one for word in node.words for one in self._expander().fields(word)]
        for word in words:
            self.variables[node.name] = word
            if not self._round(node.body):
                return

    def _loop(self, node: Looped) -> None:
        for _ in range(_MOST_ROUNDS):
            before = dict(self.variables), list(self.arguments)
            outcome = self.follow(node.condition)
            if (outcome.negated() if node.is_until else outcome) is not Outcome.MET:
                return
            changes = self._round(node.body) and before != (self.variables, self.arguments)
            if not changes or self.count[0] > _MOST_COMMANDS // 2:
                return

    def _pipe(self, node: Node) -> None:
        """Let a program change what was printed: the calculator is known, and no other one."""
        is_sum = isinstance(node, Simple) and node.words[:1] == ["bc"] and self.printed
        self.printed = [self._expander().arithmetic(self.printed[-1])] if is_sum and self.printed else [UNKNOWN]

    def _branch(self, node: Branches) -> Outcome:
        for condition, body in node.arms:
            if self.follow(condition) is Outcome.MET:
                return self._body(body)
        return self._body(node.otherwise)

    def _choose(self, node: Choice) -> None:
        word = without_marks(self._expander().text(node.word))
        for patterns, body in node.arms:
            if UNKNOWN not in word and any(matches(word, self._expander().text(pattern)) for pattern in patterns):
                self._body(body)
                return

    def _expander(self) -> Expander:
        return Expander(self.variables, self.arguments, self._substitute)

    def _substitute(self, text: str) -> str:
        """Return what a command prints, if it only prints texts that are known."""
        if self.calls > _MOST_CALLS:
            raise UserError("a command of the script has its own output in it")
        inner = replace(
            self, variables=dict(self.variables), commands=[], printed=[], calls=self.calls + 1, count=self.count
        )
        inner._whole(parse_script(text))
        return "\n".join(inner.printed or []) if inner.printed else UNKNOWN

    def _run(self, command: Simple) -> Outcome:
        expander = self._expander()
        if not command.words:
            for one in command.assigned:
                expander.assign(one)
            return Outcome.MET
        if command.words[0].startswith("(("):
            return self._test_number(command.words[0][2:-2])
        if command.words[0] == "[[":
            return self._test([expander.text(word) for word in command.words[1:-1]])
        if command.words[0] in _DECLARES:
            self._declare(command, expander)
            return Outcome.MET
        words = [one for word in command.words for one in expander.fields(word)]
        given = [expander.document(document) for document in command.documents][-1:]
        if given and self._take_document(command, words, given[0]):
            return Outcome.UNKNOWN
        return self._call(words, command.line) if words else Outcome.MET

    def _declare(self, command: Simple, expander: Expander) -> None:
        for one in command.assigned:
            expander.assign(one)
        options = "".join(word for word in command.words[1:] if word.startswith("-"))
        for word in command.words[1:]:
            if ASSIGNED.match(word):
                expander.assign(assignment_of(word))
            elif "A" in options and word.isidentifier():
                self.variables.setdefault(word, {})

    def _take_document(self, command: Simple, words: list[str], text: str) -> bool:
        """Give a here-document to the command that reads it; return whether the command is known."""
        name, *rest = words
        if name in READERS:
            given = [self._expander().text(one.words[0]) for one in command.assigned if one.name == "IFS"]
            self.variables |= read_into(name, rest, text, given[0] if given else " \t\n")
        elif name == "cat" and command.files:
            target = self._expander().text(command.files[-1])
            self.files[target] = text
        elif name == "cat" and self.printed is not None:
            self.printed.append(text.rstrip("\n"))
        elif any(word.rpartition("/")[2] in _STARTERS for word in words) and not _script_of(words):
            start = next(at for at, word in enumerate(words) if word.rpartition("/")[2] in _STARTERS)
            options = list(takewhile(lambda word: word.startswith("-"), words[start + 1 :]))
            self._follow_inner(text, words[start + 1 + len(options) :], command.line)
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
                return [self._test_number(one) for one in rest][-1] if rest else Outcome.FAILED
            case "false":
                return Outcome.FAILED
            case "eval" | "exec" | "time":
                return self.follow(parse_script(" ".join(rest))) if name == "eval" else self._call(rest, line)
            case _:
                inner = _script_of(words) or self._written_script(words)
                return self._follow_inner(*inner, line) if inner else self._record(name, rest, line)
        return Outcome.MET

    def _change(self, name: str, rest: Sequence[str]) -> None:
        """Change the arguments or the variables as a builtin does."""
        if name == "unset":
            for one in rest:
                self.variables.pop(one, None)
        elif name == "shift":
            count = int(rest[0]) if rest and rest[0].isdigit() else 1
            del self.arguments[:count]
        elif rest[:1] == ["--"]:
            self.arguments[:] = rest[1:]

    def _follow_inner(self, text: str, arguments: Sequence[str], line: int) -> Outcome:
        """Follow the script of a further shell, which changes no variable here."""
        if self.calls > _MOST_CALLS:
            raise UserError("a shell of the script starts itself")
        try:
            chain = parse_script(text)
        except UserError:
            return Outcome.UNKNOWN  # only that shell can tell
        inner = replace(
            self,
            arguments=list(arguments),
            variables=dict(self.variables),
            functions=dict(self.functions),
            commands=[],
            calls=self.calls + 1,
        )
        inner._whole(chain)
        self.commands += [replace(one, line=line + one.line - 1) for one in inner.commands]
        return Outcome.UNKNOWN

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
        if self.printed is None or name not in ("echo", "basename", "dirname", "seq"):
            self.commands.append(Program(line, (name, *rest)))
            return Outcome.MET if name in ("echo", "printf") else Outcome.UNKNOWN
        words = [word for word in rest if not word.startswith("-")]
        match name:
            case "echo":
                self.printed.append(" ".join(words))
            case "seq":
                self.printed.append(numbers(rest))
            case "basename":
                self.printed.append(without_directory(*words[:2] or ("",)))
            case _:
                self.printed.append(directory_of(words[0] if words else ""))
        return Outcome.MET

    def _test(self, words: list[str]) -> Outcome:
        """Return whether a condition of `[` or `[[` holds."""
        for operator, stops in _COMBINED.items():
            if operator in words[1:]:
                at = words.index(operator, 1)
                first, second = self._test(words[:at]), self._test(words[at + 1 :])
                if stops in (first, second):
                    return stops
                return Outcome.UNKNOWN if Outcome.UNKNOWN in (first, second) else first
        if words[:1] == ["!"]:
            return self._test(words[1:]).negated()
        words = [word for word in words if word not in ("(", ")", "\n")]
        if any(UNKNOWN in word for word in words) or (len(words) == 2 and _FILES.fullmatch(words[0])):
            return Outcome.UNKNOWN
        return self._compare([without_marks(word) for word in words])

    def _compare(self, words: list[str]) -> Outcome:
        match words:
            case ["-z", word]:
                return Outcome.of(not word)
            case ["-n", word] | [word]:
                return Outcome.of(bool(word))
            case ["-v", name]:
                return Outcome.of(name in self.variables)
            case [left, "=" | "==", right]:
                return Outcome.of(matches(left, right))
            case [left, "!=", right]:
                return Outcome.of(not matches(left, right))
            case [left, sign, right] if sign in _NUMBERS:
                return self._test_number(f"{left or 0} {_NUMBERS[sign]} {right or 0}")
        return Outcome.UNKNOWN

    def _test_number(self, expression: str) -> Outcome:
        value = self._expander().arithmetic(expression)
        return Outcome.UNKNOWN if value == UNKNOWN else Outcome.of(value != "0")


def _script_of(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Return the script that a shell among the words gets after `-c`, and its arguments."""
    start = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _SHELLS), len(words))
    options = list(takewhile(lambda word: word.startswith("-"), words[start + 1 :]))
    script = start + 1 + len(options)
    is_given = any("c" in option and not option.startswith("--") for option in options) and script < len(words)
    return (words[script], words[script + 2 :]) if is_given else None


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
