"""The check of all rows: it names file, row and column of a fault, or the run can read every row, in all file types."""

import gzip
import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.data import tokenizer as tokenizers
from megarl.data.columns import BY_SOURCE, NO_SOURCE, Needs
from megarl.data.config import DataSection, PreferenceDataSection, SFTDataSection
from megarl.data.conversations import Conversations
from megarl.data.order import Position
from megarl.data.pairs import PairStream
from megarl.data.preferences import PreferenceStream
from megarl.data.prompts import PromptDataset, PromptStream
from megarl.data.rows import Rows
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.data.uri import locate
from megarl.rewards.config import CustomRewardSection, RulesSection
from tests.support.sentencepieces import train_sentencepiece

ROW = {"prompt": "1 + 1", "data_source": "gsm8k", "reward_model": {"ground_truth": "2"}, "extra_info": {"index": 0}}
NOTHING = Needs(source=False, ground_truth=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    return str(train_sentencepiece(path, byte_fallback=True, vocab_size=550))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def dataset(file: Any, tokenizer: Tokenizer, needs: Needs = BY_SOURCE, **changes: Any) -> PromptDataset:
    section = DataSection(**{"train_files": "", "max_prompt_length": 10_000, **changes})
    return PromptDataset(section, str(file), tokenizer, needs)


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner))
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "me"]), "content": values}), max_size=2)
rows_of_any_shape = st.fixed_dictionaries(
    {"prompt": st.just("1 + 1") | messages | values},
    optional={
        "data_source": st.sampled_from(["gsm8k", "format", "sudoku"]) | values,
        "reward_model": st.fixed_dictionaries({"ground_truth": values}) | values | st.just('{"ground_truth": 1}'),
        "extra_info": values | st.just("{}"),
    },
)
NEEDS = [BY_SOURCE, Needs(source=False), NOTHING]


@given(row=rows_of_any_shape, needs=st.sampled_from(NEEDS))
def test_row_of_any_shape_is_read_or_named(place: Path, tokenizer: Tokenizer, row: dict[str, Any], needs: Any) -> None:
    file = write_lines(place / "any.jsonl", [ROW, row])
    try:
        prompts = dataset(file, tokenizer, needs)
    except ValueError as error:
        assert re.match(rf"{file}, line 2, column (prompt|data_source|reward_model|extra_info): ", str(error))
    else:
        (batch,) = PromptStream(prompts, batch_size=2, shuffle=False, seed=1).batches()
        assert isinstance(batch.prompts[1].extra_info, dict)
        assert isinstance(batch.prompts[1].data_source, str)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"prompt": None}, "column prompt: None is neither a text nor"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "column prompt: .* not supported"),
        ({"data_source": None}, "column data_source: is null, but picks the built-in reward"),
        ({"data_source": 7}, "column data_source: 7 is not a text"),
        ({"data_source": "sudoku"}, "column data_source: no built-in reward for data source 'sudoku'"),
        ({"reward_model": None}, "column reward_model: None has no ground_truth"),
        ({"reward_model": {"ground_truth": None}}, "column reward_model: .* has no ground_truth"),
        ({"reward_model": [1]}, r"column reward_model: \[1\] has no named values"),
        ({"extra_info": [1]}, r"column extra_info: \[1\] has no named values: give a struct, a map or"),
        ({"extra_info": "index 0"}, "column extra_info: the text 'index 0' is not JSON"),
        ({"prompt": None, "extra_info": 1}, "column prompt: .*; column extra_info: "),
    ],
)
@pytest.mark.parametrize("truncation", ["error", "left"])
def test_row_faults_are_found_before_row_is_reached(
    tmp_path: Path, tokenizer: Tokenizer, change: dict[str, Any], fault: str, truncation: str
) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [ROW, ROW, ROW | change])
    with pytest.raises(ValueError, match=f"^{file}, line 3, {fault}"):
        dataset(file, tokenizer, truncation=truncation)


def test_many_faulty_rows_are_counted_and_first_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [ROW | {"prompt": ""}] * 25)
    with pytest.raises(ValueError, match="line 20, column prompt: the text is empty\n... and 5 more$"):
        dataset(file, tokenizer)


def test_extra_info_as_struct_text_map_or_null(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kinds = {
        "struct": pa.array([{"a": 1}]),
        "text": pa.array(['{"a": 1}']),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "null": pa.array([None]),
    }
    for name, column in kinds.items():
        table = pa.Table.from_pylist([ROW]).drop_columns(["extra_info"]).append_column("extra_info", column)
        pq.write_table(table, tmp_path / f"{name}.parquet")
        found = dataset(tmp_path / f"{name}.parquet", tokenizer)[0].extra_info
        assert found == ({} if name == "null" else {"a": 1})


def test_prompts_alone_are_enough_if_no_rule_scores(tmp_path: Path, tokenizer: Tokenizer) -> None:
    custom = CustomRewardSection(path="own.py")
    assert Needs.of(None, CustomRewardSection()) == Needs.of(RulesSection(), custom) == NOTHING
    assert Needs.of(RulesSection(), CustomRewardSection()) == Needs()
    both = RulesSection(weights={"custom": 1.0, "gsm8k": 1.0})
    assert Needs.of(both, custom) == Needs(source=False, ground_truth=True, rules=("gsm8k",))
    assert Needs.of(RulesSection(weights={"custom": 1.0, "format": 1.0}), custom) == NOTHING
    prompt = dataset(write_lines(tmp_path / "a.jsonl", [{"q": "1"}]), tokenizer, NOTHING, prompt_key="q")[0]
    assert (prompt.data_source, prompt.ground_truth, prompt.extra_info) == (NO_SOURCE, None, {})


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


RECORDS: list[dict[str, Any]] = [
    ROW | {"prompt": chat("1 + 2"), "extra_info": {"deep": [{"a": [1.5, None]}], "text": "é漢"}},
    ROW | {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "漢 1"}]},
    ROW | {"prompt": chat("a\nb"), "reward_model": {"ground_truth": "3", "style": "rule"}},
    *(ROW | {"prompt": chat(f"{number} + 1"), "extra_info": None} for number in range(20)),
]
TEXT = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
LIST = json.dumps(RECORDS, indent=1)
FORMS: dict[str, bytes] = {
    "lines.jsonl": TEXT.encode(),
    "blank.ndjson": TEXT.replace("\n", "\r\n \t\n").encode() + b"\n\n",
    "bom.json": b"\xef\xbb\xbf" + TEXT.encode(),
    "list.json": b" \n" + LIST.encode(),
    "lines.jsonl.gz": gzip.compress(TEXT.encode()),
    "list.json.zst": pa.Codec("zstd").compress(LIST.encode(), asbytes=True),
}


def read(file: Path, tokenizer: Tokenizer) -> list[Any]:
    stream = PromptStream(dataset(file, tokenizer), batch_size=4, shuffle=True, seed=3)
    position, found = Position(), []
    for _ in range(8):  # into the second epoch
        prompts, position = stream.take(position)
        found += [
            (p.index, list(p.token_ids), p.text, p.ground_truth, p.extra_info, p.data_source) for p in prompts.prompts
        ]
    return found


@pytest.mark.parametrize("name", FORMS)
def test_same_table_in_any_format_gives_same_prompts(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    (tmp_path / name).write_bytes(FORMS[name])
    # a column of parquet has one type: every prompt is a list of messages, every extra_info a text
    rows = [record | {"extra_info": record["extra_info"] and json.dumps(record["extra_info"])} for record in RECORDS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=5)
    assert read(tmp_path / name, tokenizer) == read(tmp_path / "rows.parquet", tokenizer)


def test_pairs_and_preferences_are_read_from_json_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pairs = [{"prompt": chat(f"{number} + 1"), "response": str(number + 1), "other": "漢"} for number in range(7)]
    lines = str(write_lines(tmp_path / "rows.jsonl", pairs))
    pq.write_table(pa.Table.from_pylist(pairs), parquet := str(tmp_path / "rows.parquet"))

    def answered(file: str) -> tuple[list[Any], list[Any]]:
        sft = SFTDataSection(train_files=file, train_batch_size=3)
        two = PreferenceDataSection(train_files=file, train_batch_size=3, chosen_key="response", rejected_key="other")
        reader = Conversations(tokenizer=tokenizer, pad_token_id=None, max_length=99)
        learnt, preferred = PairStream(sft, file, tokenizer).take(3), PreferenceStream(two, file, reader).take(3)
        responses = [learnt.response_ids(sample).tolist() for sample in range(len(learnt))]
        return responses, [list(prompt.token_ids) for prompt in preferred.prompts]

    assert answered(lines) == answered(parquet)


BROKEN: dict[str, tuple[bytes, str]] = {
    "cut.jsonl": (b'{"prompt": "1"}\n\n{"prompt": "2', "line 3: a record must be one line of JSON in UTF-8"),
    "latin.jsonl": (b'{"prompt": "1"}\n{"prompt": "\xe9"}', "line 2: a record must be one line of JSON in UTF-8"),
    "number.jsonl": (b'{"prompt": "1"}\n5', "line 2: a record must be a JSON object"),
    "twice.jsonl": (b'{"prompt": "1"}\n{"prompt": "1", "prompt": "2"}', "line 2: more than one field 'prompt'"),
    "deep.jsonl": (b'{"prompt": "1"}\n{"prompt": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "line 2: .* too deeply"),
    "half.jsonl": (b'{"prompt": "1"}\n{"prompt": "a\\ud800"}', "line 2, column prompt: .* half a character"),
    "pretty.json": (b'{\n"prompt": "1"\n}', "line 1: a record must be one line of JSON"),
    "columns.jsonl": (
        b'{"question": "1"}',
        r"has no column 'prompt' \(data.prompt_key names another\); it has question",
    ),
    "empty.jsonl": (b"\n \n", "is empty: it has no record"),
    "empty.json": (b"[]", "is empty"),
    "comma.json": (b'[{"prompt": "1"},]', "cannot be read as JSON: Expecting value"),
    "behind.json": (b'[{"prompt": "1"}] 5', "cannot be read as JSON: record 0 of the list is followed by"),
    "latin.json": (b'[{"prompt": "\xe9"}]', "cannot be read as JSON: 'utf-8' codec"),
    "not.jsonl.gz": (b"plain", "cannot be read as JSON: "),
    "not.parquet": (b"plain", r"cannot be read as parquet: .* \(a JSON file must be named .jsonl or .json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    content, fault = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path / name}[ ,]+{fault}"):
        dataset(tmp_path / name, tokenizer, NOTHING)


HALVES: dict[str, dict[str, object]] = {
    "data_source": {"data_source": "a\ud800"},
    "reward_model": {"reward_model": {"ground_truth": ["2", "a\ud800"]}},
    "extra_info": {"extra_info": {"names": [{"a\ud800": 1}]}},
    "id": {"id": "a\ud800"},
}


@pytest.mark.parametrize("column", HALVES)
def test_half_characters_are_faults_in_each_column(tmp_path: Path, tokenizer: Tokenizer, column: str) -> None:
    file = write_lines(tmp_path / "half.jsonl", [ROW | {"id": "a"}, ROW | {"id": "b"} | HALVES[column]])
    with pytest.raises(ValueError, match=f"line 2, column {column}: the text has half a character .* at position 1"):
        dataset(file, tokenizer, NOTHING, prompt_id_key="id")


def test_every_unopenable_file_is_named_at_once(tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", [ROW])
    bad = write_lines(tmp_path / "bad.jsonl", [{"text": 1}])
    with pytest.raises(ValueError, match=r"absent.parquet\n.*bad.jsonl has no column 'prompt', 'extra_info'; it"):
        Rows([str(tmp_path / "absent.parquet"), str(good), str(bad)], columns=["prompt", "extra_info"])


def test_text_columns_of_any_arrow_type_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["1 + 1", "é漢", "1 + 1"]
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        struct = pa.StructArray.from_arrays([pa.array(texts).cast(kind)], ["a"])
        table = pa.table({"prompt": pa.array(texts).cast(kind), "extra_info": struct})
        pq.write_table(table, file := tmp_path / "rows.parquet")
        prompts = dataset(file, tokenizer, NOTHING)
        assert [(prompts[i].raw_prompt, prompts[i].extra_info["a"]) for i in range(3)] == [(t, t) for t in texts]


def test_non_utf8_text_and_duplicate_columns_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xe9")]
    )
    pq.write_table(pa.table({"prompt": broken}), file := tmp_path / "latin.parquet")
    with pytest.raises(ValueError, match=f"{file}, row 1, column prompt: the text is not UTF-8"):
        dataset(file, tokenizer, NOTHING)
    pq.write_table(pa.table([["1"], ["2"]], names=["prompt", "prompt"]), file := tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=f"{file} has more than one column 'prompt': rename or remove all but one"):
        dataset(file, tokenizer, NOTHING)


def other_content(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"1 + 1", b"2 + 2"))


def other_time(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def other_content_at_the_same_time(file: Path) -> None:
    before = file.stat()
    other_content(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [other_content, other_time, other_content_at_the_same_time])
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_fingerprint_shows_changed_file_of_same_size(tmp_path: Path, name: str, change: Callable[[Path], None]) -> None:
    file = write_lines(tmp_path / name, [ROW] * 3)
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist([ROW] * 3), file, compression="none")
    before = locate(str(file)).fingerprint()
    assert locate(str(file)).fingerprint() == before
    change(file)
    after = locate(str(file)).fingerprint()
    assert after.size == before.size
    assert after != before


TEMPLATES = {
    "{% for i in range(10 ** 9) %}{% endfor %}": "fails on the messages: OverflowError",
    "{{ 1 // 0 }}": "fails on the messages: ZeroDivisionError",
    "{{ messages + 1 }}": "fails on the messages: TypeError",
    "{{ 'a' * 10 ** 18 }}": "needs more than 0.5 GB of memory: mend it",
    "{{ 'a' * 10 ** 10 }}": "needs more than 0.5 GB of memory: mend it",
    "{{ 'a' | center(10 ** 10) }}": "needs more than 0.5 GB of memory: mend it",
    "{{ '%9999999999d' % 1 }}": "needs more than 0.5 GB of memory: mend it",
    "{% set n = namespace(a='aa') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}": "needs more than",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "fails on the messages: RecursionError",
    "{{ messages[0].__class__.__mro__ }}{{ ''.__class__.mro() }}": "refuses the messages: access to attribute",
    "{{ absent.attribute }}": "refuses the messages: 'absent' is undefined",
    "{{ raise_exception('roles must alternate') }}": "refuses the messages: roles must alternate",
    "{% for": "refuses the messages: ",
}
ENDLESS_TEMPLATES = [
    "{% for i in range(9 ** 5) %}{% for j in range(9 ** 5) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (10 ** 8) }}",
]


def assert_refused(directory: Path, model: str, template: str, fault: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    file = write_lines(directory / "rows.jsonl", [ROW | {"prompt": chat("1")}])
    fault = f"{file}, line 1, column prompt: the chat template of {model} {fault}"
    with pytest.raises(ValueError, match=fault):
        dataset(file, load_tokenizer(model, chat_template=template))
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_that_fail(tmp_path: Path, model: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 60)  # a slow machine still reaches the limit of memory first
    monkeypatch.setattr(tokenizers, "TEMPLATE_BYTES", 1 << 29)
    assert_refused(tmp_path, model, template, TEMPLATES[template])


@pytest.mark.parametrize("template", ENDLESS_TEMPLATES)
def test_templates_that_never_end(tmp_path: Path, model: str, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "TEMPLATE_SECONDS", 0.5)
    assert_refused(tmp_path, model, template, "does not end: it was stopped")
