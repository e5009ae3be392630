"""Prompts: real parquet files, messages about invalid rows, and an order that depends on seed and position alone."""

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.batch import Prompts
from megarl.data.config import DataSection
from megarl.data.messages import encode_prompt
from megarl.data.order import Position
from megarl.data.prompts import PromptDataset, PromptStream, truncate
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.platform.errors import UserError
from tests.support.sentencepieces import train_sentencepiece

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = train_sentencepiece(
        tmp_path_factory.mktemp("tokenizer") / "small.model", byte_fallback=True, vocab_size=550
    )
    return load_tokenizer(str(model), chat_template=TEMPLATE)


def row(prompt: Any, **changes: Any) -> dict[str, Any]:
    columns = {
        "data_source": "countdown",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": 8, "numbers": [3, 5]}},
        "extra_info": {"split": "train"},
    }
    return columns | changes


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def section(file: str, **changes: Any) -> DataSection:
    return DataSection(**{"train_files": file, "train_batch_size": 2, "max_prompt_length": 16, **changes})


def dataset(file: str | list[str], tokenizer: Tokenizer, **changes: Any) -> PromptDataset:
    return PromptDataset(section("unused", **changes), file, tokenizer)


def test_plain_and_chat_prompts_over_two_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = write(tmp_path / "plain.parquet", [row("3 5 = 8"), row("3 6 = 9", data_source="gsm8k")])
    chat = write(tmp_path / "chat.parquet", [row([{"role": "user", "content": "ab"}], extra_info=None)])
    prompts = dataset([plain, chat], tokenizer)

    assert len(prompts) == 3
    assert list(prompts[0].token_ids) == tokenizer.encode("3 5 = 8", add_special_tokens=True)
    assert prompts[0].token_ids[0] == tokenizer.bos_token_id
    assert prompts[0].text == "3 5 = 8"
    assert prompts[0].ground_truth == {"target": 8, "numbers": [3, 5]}
    assert prompts[0].extra_info == {"split": "train"}
    assert [prompts[i].index for i in range(3)] == [0, 1, 2]
    assert prompts[1].data_source == "gsm8k"
    assert list(prompts[2].token_ids) == tokenizer.chat([{"role": "user", "content": "ab"}])
    assert prompts[2].text.strip() == "user: ab"
    assert prompts[2].extra_info == {}
    assert prompts[0].raw_prompt == "3 5 = 8"
    assert prompts[2].raw_prompt == [{"role": "user", "content": "ab"}]


def test_missing_column_is_named_with_file_and_columns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "questions.parquet", [{"question": "1+1", "answer": "2"}])
    with pytest.raises(
        ValueError,
        match=r"questions.parquet has no column 'prompt' \(data.prompt_key names another\), 'data_source' "
        r"\(data.reward_fn_key names another; .*\), 'reward_model' \(not needed .*\); it has question, answer",
    ):
        dataset(file, tokenizer)
    renamed = write(tmp_path / "renamed.parquet", [row("1") | {"text": "1"}])
    with pytest.raises(ValueError, match=r"renamed.parquet has no column 'question'"):
        dataset(renamed, tokenizer, prompt_key="question")
    assert dataset(renamed, tokenizer, prompt_key="text")[0].text == "1"


def test_files_that_hold_no_rows_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    schema = pa.Table.from_pylist([row("1")]).schema
    pq.write_table(schema.empty_table(), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match=r"empty.parquet is empty"):
        dataset(str(tmp_path / "empty.parquet"), tokenizer)
    with pytest.raises(ValueError, match=r"no such data file: .*absent.parquet"):
        dataset(str(tmp_path / "absent.parquet"), tokenizer)
    (tmp_path / "text.parquet").write_text("prompt,answer\n")
    with pytest.raises(ValueError, match=r"text.parquet cannot be read as parquet"):
        dataset(str(tmp_path / "text.parquet"), tokenizer)
    with pytest.raises(ValueError, match="no data files"):
        dataset([], tokenizer)


def test_overlong_prompt_error_names_remedy(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = write(tmp_path / "first.parquet", [row("1"), row("2")])
    second = write(tmp_path / "second.parquet", [row("3"), row("+ " * 30)])
    length = len(tokenizer.encode("+ " * 30, add_special_tokens=True))
    with pytest.raises(
        ValueError,
        match=rf"second.parquet, row 1, column prompt: the prompt has {length} tokens, but data.max_prompt_length is "
        r"16: raise it, or set data.filter_overlong_prompts=true or data.truncation=left\|right\|middle",
    ):
        dataset([first, second], tokenizer)


def test_overlong_prompts_are_filtered_or_truncated_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path / "long.parquet", [row("+ " * 30), row("1 2 3"), row("- " * 30), row("4")])
    filtered = dataset(file, tokenizer, filter_overlong_prompts=True)
    assert [filtered[i].text for i in range(len(filtered))] == ["1 2 3", "4"]
    assert [filtered[i].index for i in range(len(filtered))] == [1, 3]  # numbers of rows in the file, before the filter
    assert filtered.num_filtered == 2
    with pytest.raises(ValueError, match="every prompt is longer than data.max_prompt_length=1"):
        dataset(file, tokenizer, filter_overlong_prompts=True, max_prompt_length=1)
    cut = dataset(file, tokenizer, truncation="left", max_prompt_length=3)
    ids = tokenizer.encode("1 2 3", add_special_tokens=True)
    assert list(cut[1].token_ids) == [ids[0], *ids[-2:]]  # the token that begins a text stays


def test_dropped_prompts_do_not_count_in_batches(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [row("+ " * 30 if number in (0, 1, 2, 4) else str(number)) for number in range(10)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "groups.parquet", row_group_size=3)
    filtered = dataset(str(tmp_path / "groups.parquet"), tokenizer, filter_overlong_prompts=True)
    stream = PromptStream(filtered, batch_size=2, shuffle=True, seed=1)
    assert sorted(sum((texts(stream, step) for step in range(3)), [])) == ["3", "5", "6", "7", "8", "9"]
    assert stream.sizes == {"prompts": 6, "left out": 4}


def test_ids_of_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [row("1", uid="gsm-1"), row("2", uid=None), row("3", uid="gsm-1000")]
    file = write(tmp_path / "ids.parquet", rows)
    assert dataset(file, tokenizer)[0].prompt_id is None
    prompts = dataset(file, tokenizer, prompt_id_key="uid")
    assert [prompts[index].prompt_id for index in range(3)] == ["gsm-1", None, "gsm-1000"]
    assert dataset(file, tokenizer, prompt_id_key="uid", max_prompt_id_length=8)[2].prompt_id == "gsm-1000"
    with pytest.raises(
        ValueError, match=r"ids.parquet, row 2, column uid: 'gsm-1000' has 8 characters, data.max_prompt_id_length is 7"
    ):
        dataset(file, tokenizer, prompt_id_key="uid", max_prompt_id_length=7, truncation="left")
    numbered = write(tmp_path / "numbered.parquet", [row("1", uid=17)])
    assert dataset(numbered, tokenizer, prompt_id_key="uid")[0].prompt_id == "17"


def test_reward_functions_receive_the_raw_prompt_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1 2"}]
    chat = write(tmp_path / "chat.parquet", [row(messages)])
    plain = write(tmp_path / "plain.parquet", [row("1 2")])
    asked = dataset([chat, plain], tokenizer, return_raw_chat=True, return_raw_input_ids=True, max_prompt_length=40)
    assert asked[0].extra_info == {
        "split": "train",
        "raw_chat": messages,
        "raw_input_ids": tokenizer.encode("add\n1 2", add_special_tokens=False),
    }
    assert asked[1].extra_info["raw_chat"] == "1 2"
    assert asked[1].extra_info["raw_input_ids"] == tokenizer.encode("1 2", add_special_tokens=False)
    assert dataset(chat, tokenizer, max_prompt_length=40)[0].extra_info == {"split": "train"}


def test_truncate_by_hand() -> None:
    ids = [0, 1, 2, 3, 4, 5, 6]
    assert truncate(ids, 3, "left", begin=0, end=0) == [4, 5, 6]
    assert truncate(ids, 3, "right", begin=0, end=0) == [0, 1, 2]
    assert truncate(ids, 3, "middle", begin=0, end=0) == [0, 5, 6]
    assert truncate(ids, 7, "error", begin=1, end=1) == ids
    assert truncate(ids, 4, "left", begin=1, end=2) == [0, 4, 5, 6]
    assert truncate(ids, 4, "right", begin=1, end=2) == [0, 1, 5, 6]
    assert truncate(ids, 4, "middle", begin=1, end=3) == [0, 4, 5, 6]


@pytest.mark.parametrize("where", ["left", "right", "middle"])
@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ bos_token }}" + TEMPLATE + "{% if add_generation_prompt %}assistant: {% endif %}", "assistant:"),
        ("{{ bos_token }}" + TEMPLATE + "{{ 'a: ' if add_generation_prompt else eos_token }}", "a:"),
        (TEMPLATE, ""),
    ],
)
def test_cut_prompts_begin_and_end_as_others(
    where: str, template: str, opening: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    ours = Tokenizer(deepcopy(tokenizer._tokenizer), source="here")
    ours._tokenizer.chat_template = template
    long = [{"role": "user", "content": "1 + 2 " * number} for number in (9, 12, 15)]
    files = [
        write(tmp_path / "long.parquet", [row([message]) for message in long]),
        write(tmp_path / "text.parquet", [row("3 + 4 " * 20)]),
    ]
    for limit in range(15, 40):
        prompts = dataset(files, ours, truncation=where, max_prompt_length=limit)
        for number in range(4):
            prompt = prompts[number]
            uncut = encode_prompt(prompt.raw_prompt, ours)
            assert len(prompt.token_ids) == min(limit, len(uncut))
            assert prompt.token_ids[0] == ours.bos_token_id or uncut[0] != ours.bos_token_id
            assert number == 3 or prompt.text.endswith(opening)
    if opening:
        with pytest.raises(UserError, match=r"cut to data.max_prompt_length=2 tokens, but .* tokens begin a text and"):
            dataset(files, ours, truncation=where, max_prompt_length=2)


def test_invalid_rows_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    nothing = write(tmp_path / "null.parquet", [row("1"), row(None)])
    with pytest.raises(ValueError, match=r"null.parquet, row 1, column prompt: None is neither a text nor"):
        dataset(nothing, tokenizer)
    no_truth = write(tmp_path / "truthless.parquet", [row("1", reward_model={"style": "rule"})])
    with pytest.raises(ValueError, match=r"truthless.parquet, row 0, column reward_model: .* has no ground_truth"):
        dataset(no_truth, tokenizer)


@pytest.fixture
def ten(tmp_path: Path, tokenizer: Tokenizer) -> PromptDataset:
    return dataset(write(tmp_path / "ten.parquet", [row(str(number)) for number in range(10)]), tokenizer)


def texts(stream: PromptStream, step: int) -> list[str]:
    prompts, _ = stream.take(stream.position_of(step))
    return [prompt.text for prompt in prompts.prompts]


def test_each_epoch_has_full_batches_in_own_order(ten: PromptDataset) -> None:
    stream = PromptStream(ten, batch_size=3, shuffle=True, seed=1)
    assert stream.steps_per_epoch == 3
    epochs = [[text for step in range(3) for text in texts(stream, 3 * epoch + step)] for epoch in range(2)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_order_depends_on_seed_and_position(ten: PromptDataset) -> None:
    stream = PromptStream(ten, batch_size=3, shuffle=True, seed=1)
    later = texts(stream, 7)
    assert texts(PromptStream(ten, batch_size=3, shuffle=True, seed=1), 7) == later
    other = [texts(PromptStream(ten, batch_size=3, shuffle=True, seed=-2), step) for step in range(3)]
    assert other != [texts(stream, step) for step in range(3)]
    unshuffled = PromptStream(ten, batch_size=3, shuffle=False, seed=1)
    assert texts(unshuffled, 4) == ["3", "4", "5"]


def test_prompts_are_read_when_asked_for_and_kept(ten: PromptDataset) -> None:
    with patch.object(PromptDataset, "__getitem__", autospec=True, side_effect=PromptDataset.__getitem__) as read:
        taken, _ = PromptStream(ten, batch_size=4, shuffle=True, seed=1).take(Position())
        assert len(taken.prompt_lengths()) == 4
        assert read.call_count == 0
        assert taken.prompts[2] is taken.prompts[2]
        assert read.call_count == 1
    assert [len(prompt.token_ids) for prompt in taken.prompts] == taken.prompt_lengths().tolist()
    copied = pickle.loads(pickle.dumps(taken.prompts))
    assert copied == taken.prompts
    assert Prompts(prompts=copied).prompt_lengths().equal(taken.prompt_lengths())


def test_validation_covers_all_rows_once(ten: PromptDataset) -> None:
    sizes = [len(batch.prompts) for batch in PromptStream(ten, batch_size=4, shuffle=False, seed=1).batches()]
    assert sizes == [4, 4, 2]
    (everything,) = PromptStream(ten, batch_size=None, shuffle=False, seed=1).batches()
    assert [prompt.text for prompt in everything.prompts] == [str(number) for number in range(10)]


def test_a_batch_larger_than_the_data_is_refused(ten: PromptDataset) -> None:
    with pytest.raises(ValueError, match="data.train_batch_size is 11, but the training files have 10 rows"):
        PromptStream(ten, batch_size=11, shuffle=True, seed=1).take(Position())
