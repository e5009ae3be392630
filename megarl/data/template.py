"""The chat template that `data.chat_template` gives, and the variables of `data.apply_chat_template_kwargs`.

The variables are written into the template, so that each file of the run and each reader of its exports has them.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.platform.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Environment

VARIABLES = "data.apply_chat_template_kwargs"
OWN = frozenset(
    {
        *("messages", "conversation", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
        *("tools", "documents", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "raise_exception", "strftime_now"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("image_token", "audio_token", "video_token", "additional_special_tokens"),
    }
)
"""Names of a template that megarl or transformers set."""

RANDOM = re.compile(r"\|\s*random\b|\blipsum\b")
"""Sources of random numbers in a Jinja template."""


def is_template(given: str) -> bool:
    """Return whether `data.chat_template` is the template itself and no file with it."""
    return "{" in given


def read_template(given: str) -> str:
    """Return the text of the template.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    if is_template(given):
        return given
    place = Path(given)
    try:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{given!r} cannot be read: {error}; give a Jinja file in UTF-8") from error
    raise UserError(f"{given!r} is neither a Jinja template nor a file: name a file, or write the template")


def check_template(given: str) -> None:
    """Look for faults of a template that need no tokenizer; nothing in it runs.

    Raises:
        UserError: it cannot be read, does not parse, or draws random numbers.
    """
    text = read_template(given)
    where = "the template" if is_template(given) else f"the template in {given}"
    try:
        _parse(text)
    except Exception as error:  # also RecursionError, and errors of the compiler of Python
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        raise UserError(f"{where} does not parse as Jinja: {error}{place}; mend it") from error
    found = RANDOM.search(text)
    if found:
        raise UserError(
            f"{where} draws random numbers ({found[0].strip()}), so a row would have other tokens in each run and on "
            "each rank: remove that"
        )


def variable_faults(variables: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each variable that cannot be given to a template."""
    for name, value in variables.items():
        if name in OWN:
            yield f"{name} is set by megarl itself: leave it out"
        elif not _is_assignable(name):
            yield f"{name!r} is no name of a variable in Jinja: leave it out"
        elif not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
            yield f"{name} is {value!r}: give true, false, null, a finite number or a text"


def with_variables(template: Any, variables: Mapping[str, object], *, source: str) -> Any:
    """Return the chat template (or templates by name) of the tokenizer `source`, which has the variables.

    A reader of the template that sets a variable itself gets its own value.

    Raises:
        UserError: there is no template, it does not read a variable, or a variable cannot be given.
    """
    for fault in variable_faults(variables):
        raise UserError(f"{VARIABLES}: {fault}")
    if not variables:
        return template
    if template is None:
        raise UserError(f"{VARIABLES}: {source} has no chat template: remove the key, or set data.chat_template")
    templates = template if isinstance(template, dict) else {"default": template}
    read = set[str]().union(*map(_variables_of, templates.values()))
    unread = sorted(variables.keys() - read)
    if unread:
        known = ", ".join(sorted(read - OWN)) or "none"
        raise UserError(
            f"{VARIABLES}: the chat template of {source} does not read {unread[0]}: remove it (it reads {known})"
        )
    given = {name: reduce(_with_variable, variables.items(), text) for name, text in templates.items()}
    return given if isinstance(template, dict) else given["default"]


def _with_variable(template: str, variable: tuple[str, object]) -> str:
    """Return the template behind a line that sets a variable; Jinja removes the end of this line."""
    name, value = variable
    written = "none" if value is None else json.dumps(value, ensure_ascii=False)  # else Jinja would cut characters
    return f"{{%- set {name} = {name} | default({written}) %}}\n{template}"


def _variables_of(template: str) -> set[str]:
    """Return the names that a template reads and does not set before. Raises UserError if it does not parse."""
    from jinja2.exceptions import TemplateError
    from jinja2.meta import find_undeclared_variables

    try:
        return find_undeclared_variables(_environment().parse(template))
    except TemplateError as error:
        raise UserError(f"{VARIABLES}: the chat template does not parse as Jinja: {error}; mend it") from error


def _is_assignable(name: str) -> bool:
    """Return whether a template can set a variable of this name."""
    from jinja2.exceptions import TemplateError

    if not name.isidentifier():
        return False
    try:
        _parse(f"{{% set {name} = 1 %}}")
    except TemplateError:
        return False
    return True


def _parse(text: str) -> None:
    """Compile a template as `transformers` does, without computing its constants. Raises any error."""
    _environment().compile(text)


def _environment() -> "Environment":
    """Return an environment as that of `transformers`, which computes no constants."""
    from jinja2 import nodes  # most configurations give no template
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """Parses the blocks that mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationTag, loopcontrols]
    )
