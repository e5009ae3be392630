"""A command as a declaration: its module, its parameters, its help. The module is imported when the command runs."""

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any, NoReturn

import click

from megarl.platform.imports import silence_imports
from megarl.platform.secrets import guard_output, redact
from megarl.platform.terminal import ignore_broken_pipe, print_message, visible

SIMILAR = 0.75
"""The least similarity of an unknown option and the option that was probably meant, from 0 to 1."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Command(click.Command):
    """A sub-command of `megarl`."""

    def __init__(
        self,
        name: str,
        *params: click.Parameter,
        module: str,
        section: str,
        text: str,
        example: str,
        free: bool = False,
    ) -> None:
        """Declare a command.

        Args:
            name: of the sub-command.
            params: arguments and options.
            module: has `main(argv)`.
            section: the heading of the command in the help of `megarl`.
            text: its help; the first sentence is also in the list of all commands.
            example: command lines.
            free: whether arguments that look like unknown options are arguments; the module reports them.
        """
        super().__init__(
            name,
            params=list(params),
            help=text,
            epilog=f"\b\nExample:\n{example.rstrip()}",
            context_settings={**CONTEXT, "ignore_unknown_options": free},
        )
        self.module = module
        self.section = section

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments, and keep them as they were typed. Raises UsageError for a misspelt option."""
        ctx.obj = list(args)
        rest = super().parse_args(ctx, args)
        options = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
        unknown = [typed for typed in ctx.obj if typed.startswith("--") and "=" not in typed and typed not in options]
        if ctx.resilient_parsing:
            return rest
        for typed in unknown:
            close = get_close_matches(typed, options, n=1, cutoff=SIMILAR)
            if close:
                raise click.NoSuchOption(typed, possibilities=close, ctx=ctx)
        return rest

    def invoke(self, ctx: click.Context) -> Callable[[], object]:
        """Return a function that runs `main` of the module."""
        return partial(self.run, ctx.obj)

    def run(self, argv: Sequence[str]) -> object:
        """Import the module, and return what its `main` returns for `argv`: an exit code, if anything."""
        guard_output()
        ignore_broken_pipe()
        silence_imports()
        return import_module(self.module).main(argv)


class Tasks(Command, click.Group):
    """A command with commands of its own: `tasks()` of its module has their names, `command_of(name)` declares one."""

    def __init__(self, name: str, *params: click.Parameter, **declaration: Any) -> None:
        """Declare a command, as `Command` does."""
        super().__init__(name, *params, **declaration)
        self.invoke_without_command = True
        self.no_args_is_help = False
        self.subcommand_metavar = "[TASK ...]"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the name of a task; that and what follows are the parameter `words`."""
        ctx.obj = list(args)
        click.Group.parse_args(self, ctx, args)
        ctx.params["words"] = [*getattr(ctx, "_protected_args", []), *ctx.args]
        return ctx.args

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the tasks."""
        del ctx
        return list(import_module(self.module).tasks())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the declaration of a task, if there is one of this name."""
        declared: click.Command | None = None
        if cmd_name in self.list_commands(ctx):
            declared = import_module(self.module).command_of(cmd_name)
        return declared

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the tasks, each with the first paragraph of its help."""
        with formatter.section("Tasks"):
            declared = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
            formatter.write_dl([(name, (one.help or "").partition("\n\n")[0]) for name, one in declared if one])


class Commands(click.Group):
    """The command `megarl`: lists its sub-commands by section. `help` and `version` are words for its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words before those of a sub-command."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command. Raises UsageError that names the nearest word if there is none."""
        words = [*self.list_commands(ctx), "help", "version"]
        if ctx.resilient_parsing or args[0] in words or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = get_close_matches(args[0], words, n=1)
        meant = f"Did you mean {close[0]!r}?" if close else "'megarl --help' lists all."
        raise click.UsageError(f"No such command {args[0]!r}. {meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sub-commands, each with the first sentence of its help."""
        del ctx
        commands = [command for command in self.commands.values() if isinstance(command, Command)]
        width = max(len(str(command.name)) for command in commands)
        for section in dict.fromkeys(command.section for command in commands):
            with formatter.section(section):
                formatter.write_dl(
                    [
                        (str(command.name).ljust(width), command.get_short_help_str(limit=100))
                        for command in commands
                        if command.section == section
                    ]
                )


def parse(command: Command, argv: Sequence[str]) -> dict[str, Any]:
    """Return the values of a command's parameters by name.

    Ends the program with code 0 after `--help`, and with code 2 and a redacted message if `argv` does not fit.
    """
    try:
        with command.make_context(f"megarl {command.name}", list(argv)) as context:
            return context.params
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except click.UsageError as error:
        complain(error)


def complain(error: click.UsageError) -> NoReturn:
    """Print a fault of the arguments without secrets, and end the program with code 2."""
    words = StringIO()
    error.show(file=words)
    print(redact(words.getvalue()), end="", file=sys.stderr)
    sys.exit(error.exit_code)


def print_error(error: Exception) -> None:
    """Print an error that a user can mend: without secrets, with control characters shown."""
    print_message(visible(redact(f"megarl: {error}")))
