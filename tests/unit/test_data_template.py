"""Chat templates that a configuration gives: those that `transformers` compiles pass, all others are faults."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from megarl.data.template import OWN, check_template, with_variables
from megarl.platform.errors import UserError

SOUND = (
    "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% break %}{% endfor %}",
    "{%- if not x is defined -%}{{ raise_exception('none') }}{%- endif -%}{{ strftime_now('%d') }}{{ tools | tojson }}",
    "{% macro show(m) %}{{ m }}{% endmacro %}{{ show(1) }}{# words #}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
)
BROKEN = (
    "{% for m in",
    "{{ messages[0] ",
    "{% if x %}",
    "{% endfor %}",
    "{% generation %}",
    "{{ m | nonesuch }}",
    "{{ m is nonesuch }}",
    "{% nonesuch %}",
    "{% if a %}" * 200 + "{% endif %}" * 200,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
)


def compiles(template: str) -> bool:
    try:
        _compile_jinja_template(template)
    except Exception:
        return False
    return True


@pytest.mark.parametrize("template", SOUND)
def test_parsable_template_passes_without_evaluation(template: str, tmp_path: Path) -> None:
    check_template(template)
    (tmp_path / "own.jinja").write_text(template)
    check_template(str(tmp_path / "own.jinja"))


@pytest.mark.parametrize("whole", SOUND[:-1])
def test_a_cut_template_passes_if_transformers_compile_it(whole: str) -> None:
    for end in range(1, len(whole)):
        if "{" in (template := whole[:end]):
            try:
                check_template(template)
            except UserError:
                assert not compiles(template), template
            else:
                assert compiles(template), template


@pytest.mark.parametrize("template", BROKEN)
def test_a_template_that_does_not_parse_is_refused(template: str, tmp_path: Path) -> None:
    assert not compiles(template)
    with pytest.raises(UserError, match="the template does not parse as Jinja: "):
        check_template(template)
    (tmp_path / "own.jinja").write_text(f"\n{template}")
    with pytest.raises(UserError, match=r"the template in .*/own.jinja does not parse as Jinja: "):
        check_template(str(tmp_path / "own.jinja"))


def test_the_line_of_a_fault_is_named() -> None:
    with pytest.raises(UserError, match=r"\(line 2\); mend it"):
        check_template("{{ a }}\n{% for m in")


@pytest.mark.parametrize("name", ["absent.jinja", "", ".", "x" * 5000, "a\0b", "latin.jinja"])
def test_missing_or_unreadable_template_file_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.jinja").write_bytes(b"{{ m }} \xe9")
    with pytest.raises(UserError, match="is neither a Jinja template nor a file|cannot be read"):
        check_template(name)


def test_template_with_random_numbers_is_refused() -> None:
    with pytest.raises(UserError, match="draws random numbers"):
        check_template("{{ messages | random }}")


READS = (
    "{% macro show(m) %}{{ m.content }}{{ style }}{% endmacro %}"
    "{% for m in messages %}{{ show(m) }}{% if think is defined and think is false %}<no>{% endif %}{% endfor %}"
    "{{ {'a': think} | tojson }}{% if add_generation_prompt %}>{% endif %}"
)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


def rendered(template: str, **variables: object) -> str:
    compiled = _compile_jinja_template(template)
    return compiled.render(messages=[{"role": "user", "content": "x"}], add_generation_prompt=True, **variables)


@settings(deadline=None)
@given(
    think=VALUES, style=VALUES, begin=st.sampled_from(["", "\n", "\n\n", " ", "  {%- if x %}{% endif %}", "{# a #}\n"])
)
def test_template_with_variables_renders_as_with_arguments(think: object, style: object, begin: str) -> None:
    given_variables = {"think": think, "style": style}
    template = with_variables(begin + READS, given_variables, source="here")
    assert rendered(template) == rendered(begin + READS, **given_variables)
    assert rendered(template, style="own") == rendered(begin + READS, think=think, style="own")
    again = with_variables(template, {"think": "later"}, source="here")
    assert rendered(again) == rendered(begin + READS, think="later", style=style)
    by_name = with_variables({"default": begin + READS, "tools": "{{ messages }}"}, given_variables, source="here")
    assert rendered(by_name["default"]) == rendered(template)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"tools": "x"}, "tools is set by megarl itself"),
        ({"add_generation_prompt": True}, "add_generation_prompt is set by megarl itself"),
        ({"thinks": True}, r"the chat template of here does not read thinks: remove it \(it reads style, think\)"),
        ({"think": [1]}, r"think is \[1\]: give true, false, null, a finite number or a text"),
        ({"think": {}}, "think is {}"),
        ({"think": float("nan")}, "think is nan"),
        ({"true": 1}, "'true' is no name of a variable in Jinja"),
        ({"a.b": 1}, "'a.b' is no name"),
        ({"x %}{{ y": 1}, "is no name"),
        ({"": 1}, "'' is no name"),
    ],
)
def test_variables_that_cannot_be_given_are_refused(variables: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=f"^data.apply_chat_template_kwargs: .*{message}"):
        with_variables(READS, variables, source="here")


def test_variables_need_a_template_that_parses() -> None:
    with pytest.raises(UserError, match=r"here has no chat template: remove the key, or set data\.chat_template"):
        with_variables(None, {"think": True}, source="here")
    with pytest.raises(UserError, match="does not parse as Jinja"):
        with_variables("{% if x %}", {"think": True}, source="here")
    assert with_variables(None, {}, source="here") is None


def test_arguments_of_transformers_are_no_variables() -> None:
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert parameters.keys() - {"self", "kwargs"} <= OWN
