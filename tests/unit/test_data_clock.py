"""The date in a prompt is that of the run's first start, on every rank and after every resume."""

from datetime import datetime
from pathlib import Path

import pytest

from megarl.checkpoint.template_time import TIME_FILE, record_time, recorded_time
from megarl.data.tokenizer import load_tokenizer
from megarl.platform.errors import UserError
from tests.support.sentencepieces import train_sentencepiece

FIRST = datetime(2024, 2, 29, 23, 59, 58)
DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }} {% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_damaged_time_is_named(tmp_path: Path) -> None:
    assert recorded_time(tmp_path) is None
    record_time(tmp_path, FIRST)
    assert recorded_time(tmp_path) == FIRST
    (tmp_path / TIME_FILE).write_text("yesterday", encoding="utf-8")
    with pytest.raises(UserError, match=rf"{TIME_FILE} is damaged: it holds no time"):
        recorded_time(tmp_path)


def test_a_template_sees_this_time(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "a.model", byte_fallback=True, vocab_size=600)
    message = [{"role": "user", "content": "x"}]
    ours = load_tokenizer(str(model), chat_template=DATED, now=FIRST)
    assert ours.decode(ours.chat(message)) == "29 Feb 2024 23:59:58 x"
    assert ours.render(message) == "29 Feb 2024 23:59:58 x"


@pytest.mark.parametrize("template", ["{{ messages | map(attribute='content') | random }}", "{{ lipsum(n=1) }}"])
def test_template_with_random_numbers_is_refused(template: str, tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "a.model")
    with pytest.raises(UserError, match=r"a.model draws random numbers \(.*\), so a row would have other tokens"):
        load_tokenizer(str(model), chat_template=template)
