"""The log shows level, time and rank on the console, and keeps every record of a rank in a file of the run."""

import logging
import re
from pathlib import Path

import pytest

from megarl.platform import log
from megarl.commands.cli.command import parse
from megarl.commands.cli.table import TRAIN
from tests.support.disks import small_disk

logger = logging.getLogger("megarl.test")


def test_the_console_shows_time_level_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    log.show_on_console(rank=0)
    logger.info("step %d begins", 3)
    logger.debug("too much")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO rank 0: step 3 begins\n", capsys.readouterr().err)


def test_other_ranks_show_warnings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log.show_on_console(rank=2)
    logger.info("as on rank 0")
    logger.warning("the disk of this host is full")
    assert re.fullmatch(r"\S+ WARNING rank 2: the disk of this host is full\n", capsys.readouterr().err)


def test_log_file_keeps_records_of_every_start(tmp_path: Path) -> None:
    for words in ("the first start", "the resumed run: 名前"):
        log.log_to_files(tmp_path, rank=2)
        log.set_level("info")
        logger.info(words)
    lines = (tmp_path / "log" / "rank_2.txt").read_text(encoding="utf-8").splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["the first start", "the resumed run: 名前"]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO rank 2 megarl.test: ", line) for line in lines)


def test_no_directory_is_made_without_a_record(tmp_path: Path) -> None:
    log.log_to_files(tmp_path / "run", rank=0)
    assert not (tmp_path / "run").exists()


def test_log_keeps_library_warnings_but_no_info_messages(tmp_path: Path) -> None:
    log.log_to_files(tmp_path, rank=0)
    library = logging.getLogger("some_library")
    library.info("a request")
    library.warning("it is deprecated")
    text = (tmp_path / "log" / "rank_0.txt").read_text(encoding="utf-8")
    assert "WARNING rank 0 some_library: it is deprecated" in text
    assert "a request" not in text


def test_log_level_is_an_option_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    log.show_on_console(rank=0)
    parse(TRAIN, ["config.yaml", "--log-level", "error"])
    logger.warning("not shown")
    logger.error("shown")
    assert "not shown" not in (err := capsys.readouterr().err)
    assert "ERROR rank 0: shown" in err


def test_unwritable_log_gives_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("a file where the directory should be")
    log.show_on_console(rank=0)
    log.log_to_files(tmp_path, rank=0)
    logger.info("first")
    logger.info("second")
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert [line.split(": ", 1)[1] for line in err.splitlines() if "WARNING" not in line] == ["first", "second"]


def test_a_full_disk_ends_the_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        (disk.path / "log").mkdir()
        disk.fill()
        log.show_on_console(rank=0)
        log.log_to_files(disk.path, rank=0)
        logger.info("x" * 10_000)
        logger.info("still shown")
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert "still shown" in err
