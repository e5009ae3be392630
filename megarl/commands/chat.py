"""Talk to an exported model, a checkpoint or a run: `megarl chat MODEL`."""

import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.checkpoint.directory import HUGGINGFACE, saved_steps, step_of_name
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import CHAT
from megarl.platform.errors import UserError
from megarl.platform.imports import IMPORTING
from megarl.platform.terminal import print_message, visible
from megarl.reshard.headers import has_weights

if TYPE_CHECKING:
    from megarl.rollout.chat import ChatEngine

ANEW = "/new"


def main(argv: Sequence[str]) -> int:
    """Talk as `argv` says; return 1 if there is no such model."""
    typed = parse(CHAT, argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # there is nothing to save
    try:
        with loadable(typed["model"]) as directory, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of vLLM, about torch: nothing for a person who chats
            print_message(f"{IMPORTING}, then the engine")
            from megarl.rollout.chat import ChatEngine  # imports torch

            engine = ChatEngine(directory, trust_remote_code=typed["trust_remote_code"])
            converse(engine, typed, typed["prompt"] or typed_lines())
    except UserError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


@contextmanager
def loadable(model: Path) -> Iterator[Path]:
    """Yield a directory that vLLM loads: `model` itself, the export within it, or a temporary export.

    Raises:
        UserError: `model` is neither an exported model, nor a checkpoint, nor a run, or its export fails.
    """
    for directory in (model, model / HUGGINGFACE):
        if (directory / "config.json").is_file() and has_weights(directory):
            yield directory
            return
    if step_of_name(model.resolve().name) is None and not saved_steps(model):
        raise UserError(f"{model} is neither an exported model, nor a checkpoint, nor a run with checkpoints")
    with tempfile.TemporaryDirectory(prefix="megarl-chat-") as scratch:
        out = Path(scratch) / "model"
        print(f"exporting {model} ...", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "megarl", "export", str(model), str(out)],
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{model} cannot be exported; the messages above say why")
        yield out


def converse(model: "ChatEngine", options: Mapping[str, Any], lines: Iterator[str] | Sequence[str]) -> None:
    """Print the response to each line: in one conversation if the model has a chat template, else to the line alone."""
    sampling = {name: options[name] for name in ("temperature", "max_tokens", "seed")}
    talks = model.has_template and not options["plain"]
    beginning = [{"role": "system", "content": options["system"]}] if options["system"] else []
    messages = list(beginning)
    for line in lines:
        if line == ANEW:
            messages = list(beginning)
            continue
        if not talks:
            _show(model.respond(line, **sampling))
            continue
        messages.append({"role": "user", "content": line})
        response = model.respond(messages, **sampling)
        messages.append({"role": "assistant", "content": response})
        _show(response)


def _show(response: str) -> None:
    """Print a response; a file gets its characters, a terminal must not obey them."""
    print(visible(response) if sys.stdout.isatty() else response, flush=True)


def typed_lines() -> Iterator[str]:
    """Yield the lines that a person types or that a file holds, without empty lines."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line
