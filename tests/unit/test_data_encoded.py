"""Encoded prompts: kept for the next run on the same files, tokenizer and keys, and for no other."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.data.config import DataSection
from megarl.data.parquet import write_rows
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from tests.support.sentencepieces import train_sentencepiece

TIMED = "{{ strftime_now('%H:%M:%S') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    return str(train_sentencepiece(path, byte_fallback=True, vocab_size=550))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "train.parquet", ["one", "two and three"])


def write(path: Path, prompts: list[str]) -> Path:
    rows = [{"prompt": prompt, "data_source": "gsm8k", "reward_model": {"ground_truth": "1"}} for prompt in prompts]
    write_rows(path, rows)
    return path


def dataset(file: Path, tokenizer: Tokenizer, **changes: Any) -> PromptDataset:
    return PromptDataset(DataSection(train_files="unused", **changes), str(file), tokenizer)


def texts(prompts: PromptDataset) -> list[str]:
    return [prompts[index].text for index in range(len(prompts))]


def test_same_question_finds_the_same_tokens(model: str, cache: Path, file: Path) -> None:
    first = dataset(file, load_tokenizer(model))
    [kept] = cache.iterdir()
    written = (kept / "0.arrow").stat().st_mtime_ns
    again = dataset(file, load_tokenizer(model), train_batch_size=7, seed=3, shuffle=False)
    assert [again[index] for index in range(2)] == [first[index] for index in range(2)]
    assert list(cache.iterdir()) == [kept] and (kept / "0.arrow").stat().st_mtime_ns == written


def cut(kept: Path) -> None:
    content = (kept / "0.arrow").read_bytes()
    (kept / "0.arrow").unlink()  # an earlier data set maps the file
    (kept / "0.arrow").write_bytes(content[: len(content) // 2])


def flip(kept: Path) -> None:
    content = (kept / "0.arrow").read_bytes()
    (kept / "0.arrow").unlink()
    (kept / "0.arrow").write_bytes(content.replace(b"three", b"thre4"))


def set_in_seal(kept: Path, field: str, value: object) -> None:
    seal = json.loads((kept / "0.json").read_text())
    (kept / "0.json").write_text(json.dumps(seal | {field: value}))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        lambda kept: (kept / "0.arrow").unlink(),
        lambda kept: (kept / "0.json").unlink(),
        lambda kept: (kept / "0.json").write_text(""),
        lambda kept: (kept / "0.json").write_text('{"a": 1}'),
        lambda kept: set_in_seal(kept, "counts", []),
        lambda kept: set_in_seal(kept, "num_files", 0),
        lambda kept: (kept / "foreign.arrow").touch(),
    ],
)
def test_damaged_prompts_are_encoded_anew(
    model: str, cache: Path, file: Path, damage: Callable[[Path], object]
) -> None:
    first = dataset(file, load_tokenizer(model))
    [kept] = cache.iterdir()
    damage(kept)
    again = dataset(file, load_tokenizer(model))
    assert [again[index] for index in range(len(again))] == [first[index] for index in range(2)]
    assert texts(dataset(file, load_tokenizer(model))) == ["one", "two and three"]
    assert list(cache.iterdir()) == [kept]


def test_what_killed_jobs_left_is_removed(model: str, cache: Path, file: Path) -> None:
    fresh, abandoned = (cache / f".{name}.part" for name in ("fresh", "abandoned"))
    for part in (fresh, abandoned):
        part.mkdir(parents=True)
        (part / "0.arrow").touch()
    os.utime(abandoned, times=(0, 0))
    dataset(file, load_tokenizer(model))
    assert fresh.exists() and not abandoned.exists()


def test_what_decides_on_tokens_has_its_own(model: str, cache: Path, file: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    long = [
        dataset(file, load_tokenizer(model)),
        dataset(file, load_tokenizer(model, special_tokens_in_text="allow")),
        dataset(file, load_tokenizer(model, chat_template=template)),
        dataset(file, load_tokenizer(model, chat_template=template, apply_chat_template=True)),
        dataset(
            file,
            load_tokenizer(
                model,
                chat_template=template + "{{ x }}",
                chat_template_kwargs={"x": " three"},
                apply_chat_template=True,
            ),
        ),
        dataset(write(file, ["one", "two and four"]), load_tokenizer(model)),
    ]
    assert len(list(cache.iterdir())) == 6
    assert [texts(prompts)[1].split()[-1] for prompts in long] == ["three"] * 5 + ["four"]
    assert texts(long[4])[0] == "one three"
    cut = dataset(file, load_tokenizer(model), max_prompt_length=4, truncation="right")
    dropped = dataset(file, load_tokenizer(model), max_prompt_length=8, filter_overlong_prompts=True)
    assert len(cut[1].token_ids) == 4 and len(dropped) == 1


def test_tokens_that_hold_the_time_are_not_kept(model: str, cache: Path, file: Path) -> None:
    tokenizer = load_tokenizer(model, chat_template=TIMED, apply_chat_template=True)
    assert texts(dataset(file, tokenizer)) == [f"{tokenizer.now:%H:%M:%S}{text}" for text in ("one", "two and three")]
    assert not cache.exists() or not list(cache.iterdir())


def test_a_faulty_row_leaves_nothing_behind(model: str, cache: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "faulty.parquet", ["one", "two " * 1000])
    with pytest.raises(ValueError, match=r"row 1, column prompt: the prompt has \d+ tokens"):
        dataset(file, load_tokenizer(model))
    assert not list(cache.iterdir())


def test_cache_that_cannot_be_written(model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "taken"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = sorted(tmp_path.iterdir())
    assert texts(dataset(file, load_tokenizer(model))) == ["one", "two and three"]
    assert sorted(tmp_path.iterdir()) == before
