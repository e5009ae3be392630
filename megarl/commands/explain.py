"""Explain the keys of a configuration: `megarl config [SECTION|KEY ...] [CONFIG.yaml ...] [a.b.c=value ...]`."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from megarl.checkpoint.directory import CONFIG_FILE
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import CONFIG
from megarl.config.faults import ConfigError, Fault, fault_of
from megarl.config.layers import is_override
from megarl.config.links import shown
from megarl.config.load import (
    load_config,
    load_reward_train_config,
    load_sft_config,
    load_verify_config,
    read,
    written_keys,
)
from megarl.config.reference import REQUIRED, Key, keys_of, sections_of
from megarl.config.report import start_notes
from megarl.config.root import COMMANDS, AnyConfig, Config, RewardTrainConfig, SFTConfig, VerifyConfig
from megarl.config.trial import try_out
from megarl.platform.device import decide_device
from megarl.platform.log import show_on_console
from megarl.platform.secrets import redact, redacted
from megarl.platform.terminal import visible
from megarl.section import flatten

if TYPE_CHECKING:
    from megarl.data.tokenizer import Tokenizer

LOADERS: Mapping[type, Callable[..., AnyConfig]] = {
    Config: load_config,
    SFTConfig: load_sft_config,
    RewardTrainConfig: load_reward_train_config,
    VerifyConfig: load_verify_config,
}
BY_COMMAND = {command: root for root, command in COMMANDS.items()}
MOST_COLUMNS = 120
SIMILAR = 0.6
MOST_ALIGNED = 80
"""Characters of `key = value` that others are aligned with."""


@dataclass(frozen=True)
class Values:
    """The values of a configuration, and where they are written."""

    values: Mapping[str, object]  # by dotted key, without secrets
    origins: Mapping[str, str]  # of the written keys
    faults: tuple[Fault, ...]

    @classmethod
    def read(cls, root: type, argv: Sequence[str]) -> "Values":
        """Read files and arguments."""
        if not argv:  # nothing is written, and required keys are no faults
            return cls({}, {}, ())
        config: AnyConfig
        config, faults, origins = read(root, argv)
        return cls(redacted(dict(flatten(asdict(config)))), origins, tuple(faults))


def main(argv: Sequence[str]) -> int:
    """Explain what `argv` names; return 2 if a name is unknown or the configuration is faulty, else 0."""
    typed = parse(CONFIG, argv)
    words: tuple[str, ...] = typed["words"]
    typed["check"] |= typed["as_json"]
    configuration = list[str]()
    names = list[str]()
    for word in words:
        if typed["check"] or is_configuration(word):
            configuration.append(as_file(word))
        else:
            names.append(word.removesuffix(".*"))
    try:
        root = BY_COMMAND[typed["of"]] if typed["of"] else _root_of(configuration, names)
        if typed["check"]:
            return check(root, configuration, as_json=typed["as_json"])
        found = Values.read(root, configuration)
        lines = [line for name in names for line in explain(name, root, found)]
        for line in lines or (written(root, found) if configuration else contents(root)):
            print(visible(line))
        if found.faults:
            raise ConfigError(found.faults)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check(root: type, argv: Sequence[str], *, as_json: bool) -> int:
    """Try the places and rows of a configuration, as its command does, and print its remarks.

    Args:
        root: the configuration of the command.
        argv: files and arguments.
        as_json: print `{faults, notes}`, also if there are faults; return 2 then.

    Raises:
        ConfigError: the command would refuse it, and `as_json` is false.
    """
    faults: tuple[Fault, ...] = ()
    notes: list[str] = []
    try:
        config = LOADERS[root](argv, world_size=None)
        show_on_console(rank=0)
        notes = try_here(config)
        if not isinstance(config, VerifyConfig):
            notes += start_notes(config, argv)
    except ConfigError as error:
        if not as_json:
            raise
        faults = error.faults
    if as_json:
        shown = [asdict(fault) | {"message": redact(fault.message)} for fault in faults]
        print(json.dumps({"faults": shown, "notes": list(map(redact, notes))}))
        return 2 if faults else 0
    print("no faults", *(visible(redact(f"note: {note}")) for note in notes), sep="\n")
    return 0


def try_here(config: AnyConfig, tokenizers: "dict[str, Tokenizer] | None" = None) -> list[str]:
    """Try what a configuration names, as its command does on this machine; return remarks.

    Args:
        config: of the command.
        tokenizers: those of earlier configurations, which serve those with the same data and model; is added to.

    Raises:
        ConfigError: the command would refuse it.
    """
    found = list(try_out(config))
    if isinstance(config, Config) and Path(config.actor_rollout_ref.model.path).is_dir():
        encode_prompts(config, {} if tokenizers is None else tokenizers)
    if config.trainer.device == "cuda":  # only torch knows, and it takes seconds to import
        with fault_of("trainer.device"):
            decide_device("cuda")
    return found


def encode_prompts(config: Config, tokenizers: "dict[str, Tokenizer]") -> None:
    """Read the model's files and encode all prompts as a run does, which then finds the tokens.

    A tokenizer is kept in `tokenizers`, by the data and the model.

    Raises:
        ConfigError: a file of the model is wrong, or a prompt is too long or none that its chat template takes.
    """
    from megarl.assembly.prompts import make_tokenizer, training_prompts, validation_prompts  # imports torch
    from megarl.models.source import Source

    model = config.actor_rollout_ref.model
    with fault_of("actor_rollout_ref.model.path"):
        source = Source.read(model)
        place = repr((config.data, model))
        if place not in tokenizers:
            tokenizers[place] = make_tokenizer(config.data, model, source)
    tokenizer = tokenizers[place]
    with fault_of("data.train_files"):
        training_prompts(config, tokenizer)
    with fault_of("data.val_files"):
        validation_prompts(config, tokenizer)


def is_configuration(word: str) -> bool:
    """Return whether a word is a file, a run's directory or `a.b.c=value`, and no name of a key."""
    return "=" in word or word.endswith((".yaml", ".yml")) or (Path(word) / CONFIG_FILE).is_file()


def as_file(word: str) -> str:
    """Return the configuration that a run keeps if `word` is its directory, else `word`."""
    return str(Path(word) / CONFIG_FILE) if not is_override(word) and (Path(word) / CONFIG_FILE).is_file() else word


def explain(name: str, root: type, found: Values) -> Iterator[str]:
    """Yield the explanation of a section or a key, whose name may lack its beginning.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    keys = keys_of(root)
    sections = sections_of(root)
    if name in sections:
        yield from (name, _text(sections[name], 2), "")
        yield from _section(name, keys, sections, found)
        return
    matches = [path for path in keys if f".{path}".endswith(f".{name}")]
    for path in matches:
        yield from _key(path, keys[path], found)
    if matches:
        return
    parts = [path for path in sections if f".{path}".endswith(f".{name}")]
    for path in parts:
        yield from explain(path, root, found)
    if not parts:
        raise ConfigError([Fault(name, f"unknown key: {_nearest(name, [*keys, *sections])}")])


def contents(root: type) -> Iterator[str]:
    """Yield a line for each section, and for each key outside of sections."""
    keys = keys_of(root)
    sections = sections_of(root)
    yield f"The sections of `megarl {COMMANDS[root]}`; `megarl config SECTION` lists the keys."
    yield ""
    for path, text in sections.items():
        count = sum(key.rpartition(".")[0] == path for key in keys)
        yield f"{path} ({count} keys)\n{_text(text, 4)}"
    for path in keys:
        if "." not in path:
            yield f"{path}\n{_text(keys[path].text, 4)}"


def written(root: type, found: Values) -> Iterator[str]:
    """Yield each file that writes keys, and the command line; below it a line for each key: value and default."""
    keys = keys_of(root)
    values = {path: shown(_value(path, found)) for path in sorted(found.origins)}
    width = max((len(line) for line in map(" = ".join, values.items()) if len(line) <= MOST_ALIGNED), default=0)
    for origin in dict.fromkeys(found.origins.values()):
        yield origin
        for path, value in values.items():
            if found.origins[path] == origin:
                yield f"  {f'{path} = {value}':{width}}  ({_remark(value, keys[path])})"


def _remark(value: str, key: Key) -> str:
    default = _default(key)
    if value == default:
        return "the default"
    return default if default == REQUIRED else f"default {default}"


def _root_of(configuration: Sequence[str], names: Sequence[str]) -> type:
    """Return the root that knows most of the written keys and of the names; in doubt that of `megarl train`."""

    def knows(root: type) -> int:
        paths = [f".{path}" for path in (*keys_of(root), *sections_of(root))]
        known = sum(any(path.endswith(f".{name}") for path in paths) for name in names)
        return known + len(written_keys(root, configuration))

    return max(COMMANDS, key=knows)


def _section(name: str, keys: Mapping[str, Key], sections: Mapping[str, str], found: Values) -> Iterator[str]:
    for path, key in keys.items():
        if path.rpartition(".")[0] == name:
            yield from _key(path, key, found)
    inner = [path for path in sections if path.rpartition(".")[0] == name]
    if inner:
        yield f"sections in it: {', '.join(inner)}"


def _key(path: str, key: Key, found: Values) -> Iterator[str]:
    yield path
    yield _text(f"{key.text} {key.condition}", 2)
    yield f"  type     {_plain(key.kind)}"
    yield f"  default  {_default(key)}"
    if found.values:
        yield f"  value    {shown(_value(path, found))}   ({found.origins.get(path, 'default')})"
    yield ""


def _value(path: str, found: Values) -> object:
    """Return a value; a mapping is put together from its parts."""
    if path in found.values:
        return found.values[path]
    inside = f"{path}."
    parts = {key.removeprefix(inside): value for key, value in found.values.items() if key.startswith(inside)}
    return parts or None


def _nearest(name: str, known: Sequence[str]) -> str:
    last = {path.rpartition(".")[2]: path for path in reversed(known)}
    close = get_close_matches(name, known, n=3, cutoff=SIMILAR)
    close += [last[word] for word in get_close_matches(name.rpartition(".")[2], last, n=3, cutoff=SIMILAR)]
    listed = " or ".join(dict.fromkeys(close))
    return f"did you mean {listed}?" if listed else "`megarl config` lists the sections"


def _default(key: Key) -> str:
    return _plain(key.default) or "''"


def _plain(text: str) -> str:
    return text.replace("`", "")


def _text(text: str, indent: int) -> str:
    """Return a text for a terminal, without the marks of Markdown."""
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    plain = _plain(re.sub(r"\*((?:Read only if|Not read)[^*]*)\*", r"\1", text))
    return fill(plain.strip(), width=width, initial_indent=" " * indent, subsequent_indent=" " * indent)
