"""Write a launch of another trainer as a configuration: `megarl convert SCRIPT.sh|CONFIG.yaml|"COMMAND LINE"`."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.platform import early  # noqa: F401 - before what takes seconds to import
from megarl.commands.cli.command import parse, print_error
from megarl.commands.cli.table import CONVERT
from megarl.commands.convert.converted import Converted
from megarl.commands.convert.launch import find_launch, is_command_line, read_source
from megarl.commands.convert.translate import convert_file, convert_launch
from megarl.commands.convert.write import to_text
from megarl.config.layers import YAML
from megarl.platform.errors import UserError
from megarl.platform.secrets import guard_output
from megarl.platform.terminal import visible

_SUPERVISED = """\
supervised fine-tuning, whose keys are not converted. Write a file for `megarl sft`, as configs/quickstart_sft.yaml: \
model.path is the model, and `megarl prepare own --sft` makes its data (docs/data.md)"""
_OF_REWARDS = ("algorithm.", "actor_rollout_ref.")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def main(argv: Sequence[str] = sys.argv[1:]) -> int:
    """Write the configuration to standard output; return 1 if something is to be decided, 2 if there is no launch."""
    typed = parse(CONVERT, argv)
    try:
        found, heading = convert(typed["source"], typed["arguments"])
    except UserError as error:
        print_error(error)
        return 2
    print(to_text(found, heading), end="")
    renamed = sum(text.startswith("was ") for text in found.comments.values())
    print(
        f"{len(found.leaves)} keys, {renamed} of them under another name; {len(found.dropped)} dropped, as they change "
        f"nothing here; {len(found.decisions)} to be decided",
        file=sys.stderr,
    )
    return 1 if found.decisions else 0


def convert(source: str, arguments: Sequence[str] = ()) -> tuple[Converted, str]:
    """Return the configuration of a script, a file or a command line, and the heading of its file.

    Raises:
        UserError: the source cannot be read, or has no launch of reinforcement learning.
    """
    path = Path(source)
    if path.suffix in YAML and not is_command_line(source):
        read_source(source)
        return convert_file(path), f"megarl convert {path.name}"
    variables = [(match[1], match[2]) for word in arguments if (match := _VARIABLE.fullmatch(word))]
    others = [word for word in arguments if not _VARIABLE.fullmatch(word)]
    launched = find_launch(read_source(source), others, variables)
    learns_from_rewards = any(word.lstrip("+").startswith(_OF_REWARDS) for word in launched.words)
    if "sft" in re.split(r"[._]", launched.program.rpartition("/")[2]) and not learns_from_rewards:
        raise UserError(f"{visible(source)} launches {visible(launched.program)}: {_SUPERVISED}")
    name = "a command line" if is_command_line(source) else path.name
    heading = f"megarl convert {name}: the launch of {launched.program} in line {launched.line}"
    if launched.others:
        heading += f"; there are {launched.others} further launches, with fewer keys"
    base = Path() if is_command_line(source) else path.parent
    return convert_launch(launched, base=base), visible(heading)


if __name__ == "__main__":
    guard_output()
    sys.exit(main())
