"""YAML with links: what is a number, what is refused, and where links lead."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yaml import YAMLError

from megarl.config.links import follow, parse
from megarl.platform.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("1.2.3", "1.2.3"),
        ("e3", "e3"),
        ("2024-01-01", "2024-01-01"),
        ("off", False),
        ("", None),
        ("[1, {a: b}]", [1, {"a": "b"}]),
        ("{<<: {a: 1, b: 2}, b: 3}", {"a": 1, "b": 3}),
        ("[&x [1], *x]", [[1], [1]]),
        (r"\${a", r"\${a"),
    ],
)
def test_a_text_has_the_value_of_its_type(text: str, value: object) -> None:
    assert parse(text) == value and type(parse(text)) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: 1, b: 2, a: 3}", "found duplicate key a"),
        ("{1: a, 1: b}", "found duplicate key 1"),
        ("&x [*x]", "recursive"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        *(
            (text, "neither ${a.b.c} nor")
            for text in ("${a", "${}", "a ${b} ${", "${a.${b}}", "${.a}", "${oc.select:a}")
        ),
    ],
)
def test_ambiguous_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(YAMLError, match=re.escape(message)):
        parse(text)


def by_hand(written: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the keys that lead to a value, each filled in when its leaders are known."""
    known: dict[str, Any] = {}

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str) or "\\" in value:
            return value.replace("\\", "") if isinstance(value, str) else value
        parts = re.split(r"(\$\{.*?\})", value.replace("oc.env:NONE,", "="))
        found = [known[part[2:-1]] if part[:2] == "${" and part[2] != "=" else part for part in parts]
        found = [parse(part[3:-1]) if isinstance(part, str) and part[:3] == "${=" else part for part in found]
        return found[1] if len(parts) == 3 and not parts[0] + parts[2] else "".join(map(str, found))

    while True:
        found = {}
        for key in written.keys() - known.keys():
            leaders = re.findall(r"(?<!\\)\$\{(\w)\}", str(written[key]))
            if written[key] != "???" and all(leader in known for leader in leaders):
                found[key] = fill(written[key])
        if not found:
            return known
        known |= found


@given(
    written=st.dictionaries(
        st.sampled_from("abcdef"),
        st.sampled_from(
            ["${%s}", "x/${%s}", "${%s}-${a}", r"\${%s}", "${oc.env:NONE,%s}", "u${oc.env:NONE,7}", "it's %s"]
        ).flatmap(lambda text: st.sampled_from("abcdefg").map(lambda key: text.replace("%s", key)))
        | st.sampled_from([1, 0.5, None, True, "word", [1, "${a}"], {"b": "${c}"}, "???"]),
    )
)
def test_link_resolves_like_values_filled_in_by_hand(written: dict[str, Any]) -> None:
    known = by_hand(written)
    for key in written:
        if key in known:
            assert follow(key, written) == known[key] and type(follow(key, written)) is type(known[key])
        else:
            with pytest.raises(UserError):
                follow(key, written)


def test_link_resolves_to_mapping_part_and_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/scratch")
    monkeypatch.delenv("NOWHERE", raising=False)
    values = {"a.b": {"c": {"d": "${ e }"}}, "e": 5, "place": "${oc.env:PLACE}/x", "size": "${oc.env:NOWHERE, 8}"}
    assert follow("a.b.c.d", values) == 5
    assert (follow("place", values), follow("size", values)) == ("/scratch/x", 8)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${b.z}", "there is no key b.z"),
        ("${z}", "there is no key z"),
        ("${a}", "a leads back to itself"),
        ("x ${c}", "c has no value"),
        ("${oc.env:NOWHERE}", "there is no variable NOWHERE in the environment"),
        ("${oc.env:NOWHERE,[a}", "the value for a missing NOWHERE is not valid YAML: put it in quotes"),
    ],
)
def test_a_link_to_nowhere_is_an_error(value: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        follow("a", {"a": value, "b": {"y": 1}, "c": "???"})
