"""Completion of configuration keys and of files, for the shells that click knows."""

from collections.abc import Callable

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


def of(command: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return a function that completes keys of a command's configuration, or else files."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        del ctx, param
        words = [f"{key}=" for key in keys(command) if incomplete and key.startswith(incomplete)]
        return [CompletionItem(word) for word in words] or [CompletionItem(incomplete, type="file")]

    return complete


def keys(command: str) -> list[str]:
    """Return the dotted keys that a command reads."""
    from megarl.config.reference import ROOTS
    from megarl.config.schema import Schema

    root = next(root for root, (_, name) in ROOTS.items() if name == command)
    return sorted(Schema.of(root).leaves)
