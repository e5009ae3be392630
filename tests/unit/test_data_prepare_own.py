"""`megarl prepare own`: a user's rows in every format become the same files, and mistakes name place and remedy."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from megarl.commands.prepare import main
from megarl.config.checks import data_faults
from megarl.data.columns import Needs
from megarl.data.config import DataSection
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models.config import CheckpointSection
from tests.support.sentencepieces import train_sentencepiece

ROWS = [{"question": f"What is {n} + 1, please?", "solution": f"00{n + 1}", "level": f"l{n % 2}"} for n in range(40)]


CHAT = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
SHARED = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1 + 1 ="},
    {"from": "gpt", "value": "2"},
]
ASKED = [{"role": "system", "content": "Be brief."}, *CHAT[:1]]
LONGER = [*CHAT, {"role": "user", "content": "and 1?"}, {"role": "assistant", "content": "3"}]


def jsonl(directory: Path) -> Path:
    (path := directory / "mine.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return path


def json_list(directory: Path) -> Path:
    (path := directory / "mine.json").write_text(json.dumps(ROWS))
    return path


def separated(separator: str, suffix: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        with (path := directory / f"mine{suffix}").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=separator)
            writer.writeheader()
            writer.writerows(ROWS)
        return path

    return write


def parquet(directory: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path := directory / "mine.parquet")
    return path


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def saved_data_set(directory: Path) -> Path:
    """Write the files of `Dataset.save_to_disk`."""
    write_stream(directory / "saved" / "data-00000-of-00002.arrow", ROWS[:30])
    table = pa.Table.from_pylist(ROWS[30:])
    second = directory / "saved" / "data-00001-of-00002.arrow"
    with pa.OSFile(str(second), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (directory / "saved" / "state.json").write_text("{}")
    (directory / "saved" / "cache-1c80317fa3b1799d.arrow").write_bytes(second.read_bytes())  # of `Dataset.map`
    return directory / "saved"


def saved_splits(directory: Path) -> Path:
    """Write the files of `DatasetDict.save_to_disk`."""
    write_stream(directory / "splits" / "train" / "data-00000-of-00001.arrow", ROWS)
    write_stream(directory / "splits" / "test" / "data-00000-of-00001.arrow", ROWS[:1])
    return directory / "splits"


def arrow_file(directory: Path) -> Path:
    table, path = pa.Table.from_pylist(ROWS), directory / "mine.arrow"
    with pa.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path


def own(*options: object, out: Path) -> dict[str, list[dict[str, Any]]]:
    main(["own", *map(str, options), "--out", str(out)])
    return {path.stem: pq.read_table(path).to_pylist() for path in out.glob("*.parquet")}


COLUMNS = ("--prompt", "question", "--answer", "solution", "--keep", "level")


@pytest.mark.parametrize(
    "write",
    [
        jsonl,
        json_list,
        separated(",", ".csv"),
        separated("\t", ".tsv"),
        parquet,
        saved_data_set,
        saved_splits,
        arrow_file,
    ],
)
def test_every_format_gives_the_same_rows(write: Callable[[Path], Path], tmp_path: Path) -> None:
    splits = own(write(tmp_path), *COLUMNS, out=tmp_path / "out")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 36, "val": 4}
    rows = sorted((row for rows in splits.values() for row in rows), key=lambda row: row["extra_info"]["index"])
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": row["question"]}] for row in ROWS]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [row["solution"] for row in ROWS]
    assert [row["extra_info"]["level"] for row in rows] == [row["level"] for row in ROWS]
    assert {row["extra_info"]["split"] for row in splits["val"]} == {"val"}


def test_the_files_are_those_of_a_run(tmp_path: Path) -> None:
    own(jsonl(tmp_path), *COLUMNS, out=tmp_path / "out")
    model = train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=100)
    section = DataSection(train_files=str(tmp_path / "out" / "train.parquet"))
    prompts = PromptDataset(section, section.train_files, load_tokenizer(str(model)), Needs(source=False))
    assert len(prompts) == 36
    assert prompts[0].data_source == "own"


def test_prompts_may_be_texts_with_words_around(tmp_path: Path) -> None:
    options = ("--plain", "--template", "Q: {prompt} A:", "--val", 0)
    splits = own(jsonl(tmp_path), *COLUMNS, *options, out=tmp_path / "out")
    assert splits.keys() == {"train"}
    assert splits["train"][3]["prompt"] == "Q: What is 3 + 1, please? A:"
    chats = own(jsonl(tmp_path), *COLUMNS, "--system", "Be brief.", out=tmp_path / "chats")
    assert [message["role"] for message in chats["val"][0]["prompt"]] == ["system", "user"]


def test_validation_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    splits = own(jsonl(tmp_path), *COLUMNS, "--val-from", parquet(tmp_path), out=tmp_path / "out")
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 40, "val": 40}


def test_prompts_are_shown_as_the_model_reads_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train_sentencepiece(tmp_path / "tokenizer.model", vocab_size=100)
    own(jsonl(tmp_path), *COLUMNS, "--tokenizer", model, out=tmp_path / "out")
    printed = capsys.readouterr().out
    for number in range(3):
        assert f"row {number} of train as the model reads it" in printed
    assert "row 3 of train" not in printed
    assert "its ground truth: '00" in printed
    assert "longest of 36 prompts: " in printed


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"q": "a"}], (), "has no column 'prompt' (--prompt names another); it has q"),
        (
            [{"q": "a"}],
            ("--prompt", "x", "--answer", "y"),
            "'x' (--prompt names another), 'y' (--answer names another)",
        ),
        ([{"prompt": "a"}, {"prompt": ""}], (), "line 2, column prompt: the text is empty"),
        (
            [{"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}],
            ("--answer", "n"),
            "line 2, column n: 'x' is of type str",
        ),
        ([{"prompt": "a"}], ("--val", "1"), "--val 1: there are 1 rows, and at least one must be left"),
        ([{"prompt": "a"}] * 9, ("--train", "-5"), "'--train': -5 is not in the range x>=1"),
        ([{"prompt": "a"}] * 9, ("--train", "0"), "'--train': 0 is not in the range x>=1"),
        ([{"prompt": "a"}] * 9, ("--val", "-1"), "'--val': -1 is not in the range x>=0"),
        ([{"prompt": "a"}], ("--val", "1", "--val-from", "b.csv"), "leave out --val or --val-from"),
        ([{"prompt": "a"}], ("--template", "x"), "--template 'x' has no {prompt}"),
        ([{"prompt": [{"role": "user", "content": "a"}]}], ("--plain",), "is a list of messages, and --plain"),
        ([{"prompt": CHAT}, {"prompt": CHAT[:1]}], (), "line 2, column prompt: the last message of some conversations"),
        ([{"prompt": CHAT, "a": "2"}], ("--answer", "a"), "line 1, column prompt: the last message is the assistant's"),
        ([{"prompt": CHAT[1:]}], (), "line 1, column prompt: without the last message, which is the assistant's: []"),
        ([{"prompt": [{"from": "ghost", "value": "a"}]}], (), "line 1, column prompt: message 0: role 'ghost' is none"),
        ([{" prompt": "a", "b;c": "", "d e": ""}], (), "it has ' prompt', 'b;c', d e"),
        ([{"prompt": "a"}], ("--sft",), "line 1: there is no response: name its column with --answer"),
        ([{"prompt": "a", "b": " "}], ("--sft", "--answer", "b"), "line 1: the response is no text: ' '"),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(
    rows: list[Any], options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "mine.jsonl", *rows)
    with pytest.raises(SystemExit) as ending:
        own(file, *options, out=tmp_path / "out")
    assert ending.value.code == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_faulty_rows_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["a", "", "b", "", *([{"role": f"r{number}", "content": "c"}] for number in range(11)), ""]
    file = write_lines(tmp_path / "mine.jsonl", *({"prompt": prompt} for prompt in prompts))
    with pytest.raises(SystemExit):
        own(file, out=tmp_path / "out")
    first, *others, last = capsys.readouterr().err.splitlines()
    assert first == f"megarl prepare: {file}, line 2, column prompt: the text is empty (and 2 more rows)"
    assert [line.partition(": message 0: role 'r")[0] for line in others] == [
        f"{file}, line {5 + number}, column prompt" for number in range(9)
    ]
    assert last == "... and 2 more rows with other faults"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([1, 10**30], "row 1, column reward_model: {'style': 'rule', 'ground_truth': 1" + "0" * 30 + "} does not fit"),
        ([{"k": 1}, {"k": 2}, {"k": "t"}, {"k": 3}], "row 2, column reward_model: {'style': 'rule', 'ground_truth': {"),
        ([["a"], [1]], "row 1, column reward_model: "),
        (
            [{}, {}, {"a": 1}, {"a": "t"}],
            "row 3, column reward_model: {'style': 'rule', ",
        ),
        ([{}, {}], "column reward_model: Cannot write struct type "),
        (["a", "\ud800"], "row 1, column reward_model: "),
    ],
)
def test_value_that_parquet_cannot_hold_is_named(
    answers: list[Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "mine.jsonl", *({"prompt": "a", "b": answer} for answer in answers))
    with pytest.raises(SystemExit) as ending:
        own(file, "--answer", "b", "--val", 0, out=tmp_path / "out")
    assert ending.value.code == 2
    printed = capsys.readouterr().err
    assert f"{tmp_path / 'out' / 'train.parquet'}, {words}" in printed
    assert "write all values alike, for example as texts" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["file", "/proc/none"])
def test_place_that_takes_no_files_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        own(write_lines(tmp_path / "mine.jsonl", {"prompt": "a"}), out=tmp_path / name)
    assert f"megarl prepare: --out={tmp_path / name} cannot be written: " in capsys.readouterr().err


def test_missing_column_of_text_table_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = separated(",", ".csv")(tmp_path)
    with pytest.raises(SystemExit):
        own(file, out=tmp_path / "out")
    assert f"{file} has no column 'prompt' (--prompt names another); it has question, solution, level" in (
        capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        own(tmp_path / "missing.csv", out=tmp_path / "out")
    assert f"no such file: {tmp_path}/missing.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answer"),
    [
        ({"messages": CHAT}, ("--prompt", "messages"), CHAT[:1], "2"),  # of TRL and of verl's supervised files
        ({"conversations": SHARED}, ("--prompt", "conversations"), ASKED, "2"),  # of ShareGPT
        ({"messages": LONGER}, ("--prompt", "messages"), LONGER[:3], "3"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, ("--answer", "completion"), CHAT[:1], "2"),  # of TRL
        ({"prompt": "1 + 1 =", "completion": "2"}, ("--answer", "completion"), CHAT[:1], "2"),
        ({"conversations": SHARED[:2], "total": "2"}, ("--prompt", "conversations", "--answer", "total"), ASKED, "2"),
    ],
)
@pytest.mark.parametrize("write", ["jsonl", "parquet"])
def test_conversations_of_other_trainers_are_read(
    row: dict[str, Any], options: tuple[str, ...], prompt: list[Any], answer: str, write: str, tmp_path: Path
) -> None:
    if write == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "mine.parquet")
        file = str(tmp_path / "mine.parquet")
    else:
        file = write_lines(tmp_path / "mine.jsonl", row)
    (scored,) = own(file, *options, "--val", 0, out=tmp_path / "rl")["train"]
    assert (scored["prompt"], scored["reward_model"]["ground_truth"]) == (prompt, answer)
    (supervised,) = own(file, *options, "--val", 0, "--sft", out=tmp_path / "sft")["train"]
    assert (supervised["prompt"], supervised["response"]) == (prompt, answer)
    assert "reward_model" not in supervised


def test_run_naming_saved_data_set_is_referred_here(tmp_path: Path) -> None:
    data = DataSection(train_files=str(saved_data_set(tmp_path)))
    (fault,) = data_faults(data, CheckpointSection(path="nobody/nothing"))
    assert "is a directory: name the files in it, or convert a saved data set with `megarl prepare own" in fault.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q,a\n1,2\ncafé,3\n".encode("latin-1"), "Row #3"),
        ("q,a\n1,2\n".encode("utf-16"), "the text must be UTF-8"),
        (b"q,a\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
    ],
)
def test_damaged_text_table_names_row_and_remedy(
    text: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.csv").write_bytes(text)
    with pytest.raises(SystemExit):
        own(tmp_path / "mine.csv", "--prompt", "q", "--answer", "a", out=tmp_path / "out")
    printed = capsys.readouterr().err
    assert said in printed and "the text must be UTF-8, with as many cells in each row" in printed


def test_cells_of_a_text_table_may_be_long(tmp_path: Path) -> None:
    text = "x" * 3_000_000
    (tmp_path / "mine.csv").write_text(f"q\n{text}\ny\n")
    rows = own(tmp_path / "mine.csv", "--prompt", "q", "--plain", out=tmp_path / "out")["train"]
    assert [row["prompt"] for row in rows] == [text, "y"]


def test_files_of_earlier_calls_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for num_val, is_left in ((4, False), (0, True)):
        own(jsonl(tmp_path), "--prompt", "question", "--val", num_val, out=tmp_path / "out")
        assert ("val.parquet is of an earlier call" in capsys.readouterr().out) is is_left


def test_rows_that_cannot_teach_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"{number} + 1", "total": str(number + 1)} for number in range(20)]
    rows += [{"prompt": " ", "total": "1"}, {"prompt": "5 - 5", "total": ""}, rows[0]]
    own(write_lines(tmp_path / "mine.jsonl", *rows), "--answer", "total", "--val", 0, "--plain", out=tmp_path / "out")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert sorted(note.partition(";")[0] for note in notes) == [
        "note: 1 of 23 rows: prompt and ground truth are those of an earlier row",
        "note: 1 of 23 rows: the ground truth is empty",
        "note: 1 of 23 rows: the prompt is blank",
    ]
    assert f"the first is {tmp_path / 'out' / 'train.parquet'}, row 20" in " ".join(notes)
