"""Completion of configuration keys and of files, for the shells that click knows."""

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class

SETUP = """\
Completion of commands, options and keys: add to the start-up file of your shell

\b
  bash  eval "$(_MEGARL_COMPLETE=bash_source megarl)"
  zsh   eval "$(_MEGARL_COMPLETE=zsh_source megarl)"
  fish  _MEGARL_COMPLETE=fish_source megarl | source"""


@add_completion_class
class Bash(BashComplete):
    """Completion in bash, without a space after `a.b.c=`."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value); [[ $value == *= ]] && compopt -o nospace"
    )


@add_completion_class
class Zsh(ZshComplete):
    """Completion in zsh, without a space after `a.b.c=`."""

    source_template = ZshComplete.source_template.replace(
        "compadd -U -V unsorted -a completions",
        """local -a keys=("${(@M)completions:#*=}") words=("${(@)completions:#*=}")
        compadd -U -S '' -V keys -a keys
        compadd -U -V unsorted -a words""",
    )


class ConfigurationKey(click.types.UnprocessedParamType):
    """Any word; a shell completes it to a key of a command's configuration, or else to a file."""

    def __init__(self, command: str) -> None:
        self.command = command

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the keys that begin with a word, each with its sign of equality."""
        words = [f"{key}=" for key in keys(self.command) if incomplete and key.startswith(incomplete)]
        return [CompletionItem(word) for word in words] or [CompletionItem(incomplete, type="file")]


def keys(command: str) -> list[str]:
    """Return the dotted keys that a command reads."""
    from megarl.config.root import COMMANDS
    from megarl.config.schema import Schema

    root = next(root for root, name in COMMANDS.items() if name == command)
    return sorted(Schema.of(root).leaves)
