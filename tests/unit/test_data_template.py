"""Chat templates that a configuration gives: those that `transformers` compiles pass, all others are faults."""

from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from megarl.data.template import check_template
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
