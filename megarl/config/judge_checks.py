"""Checks of the judge behind a server."""

import re
from collections.abc import Iterator, Mapping
from string import Formatter

from megarl.config.faults import Fault
from megarl.platform.secrets import is_secret
from megarl.rewards.config import JudgeSection
from megarl.rewards.signature import ARGUMENTS, PROMPT

PLACES = (PROMPT, *ARGUMENTS)
"""The names in braces that a template may have."""


def judge_faults(judge: JudgeSection, where: str, *, environ: Mapping[str, str] | None) -> Iterator[Fault]:
    """Check address, template, pattern, range and key of a judge; None as `environ`: without the key's value."""
    if not (judge.url or "").startswith(("http://", "https://")):
        yield Fault(f"{where}.url", f"{judge.url} is no address: give one such as http://host:8000/v1")
    if not judge.model:
        yield Fault(f"{where}.model", "is empty: name the model that the server offers")
    yield from _template_faults(judge.template, f"{where}.template")
    yield from _pattern_faults(judge.pattern, f"{where}.pattern")
    if judge.lowest >= judge.highest:
        yield Fault(f"{where}.lowest", f"{judge.lowest:g} is not below {where}.highest={judge.highest:g}: lower it")
    name = judge.api_key_variable
    if name:
        yield from _key_faults(name, f"{where}.api_key_variable", environ)


def _template_faults(template: str, key: str) -> Iterator[Fault]:
    try:
        named = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        yield Fault(key, f"{error}: write braces that stand for themselves twice, {{{{ and }}}}")
        return
    places = {re.split(r"[.\[]", name)[0] for name in named}
    unknown = sorted(places - {*PLACES})
    if unknown:
        known = ", ".join(f"{{{place}}}" for place in PLACES)
        yield Fault(key, f"there is no {{{unknown[0]}}}: choose from {known}, or write {{extra_info[KEY]}}")
    if "solution_str" not in places:
        yield Fault(key, "does not show the response: write {solution_str} into the template")


def _pattern_faults(pattern: str, key: str) -> Iterator[Fault]:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Fault(key, f"is no regular expression: {error}")
        return
    if groups != 1:
        yield Fault(key, f"has {groups} groups: write one, (...), around the number; others as (?:...)")


def _key_faults(name: str, key: str, environ: Mapping[str, str] | None) -> Iterator[Fault]:
    if not is_secret(name):
        yield Fault(
            key,
            f"{name} is no name of a secret, so that its value would not be hidden in messages: "
            "choose one such as JUDGE_API_KEY",
        )
    elif environ is not None and not environ.get(name):
        yield Fault(key, f"the environment variable {name} is not set: export it, or write null")
