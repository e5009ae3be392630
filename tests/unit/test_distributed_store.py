"""An error that all ranks find is printed by rank 0 alone, whatever its text is."""

import re
from pathlib import Path

import pytest
from torch.distributed import HashStore, TCPStore

from megarl.distributed.failures import report
from megarl.distributed.place import Launch
from megarl.distributed.store import reported_by_rank0
from megarl.platform.errors import UserError


def place(rank: int) -> Launch:
    return Launch(rank=rank, world_size=2, local_rank=rank, local_world_size=2)


def test_rank_0_reports_shared_error_for_all() -> None:
    store = HashStore()
    assert not reported_by_rank0(store, "no tokenizer", place(0))
    assert reported_by_rank0(store, "no tokenizer", place(1))


@pytest.mark.parametrize("kind", [ValueError, UserError])
def test_error_with_half_a_character_is_reported(tmp_path: Path, kind: type[Exception]) -> None:
    report(kind("no file b\udcffd"), tmp_path, place(0), HashStore())
    assert "no file b\\udcffd" in (tmp_path / "errors" / "rank_0.txt").read_text(encoding="utf-8")


def test_failed_import_is_reported_with_its_cause(tmp_path: Path) -> None:
    try:
        try:
            raise RuntimeError("operator nms does not exist")
        except RuntimeError as cause:
            raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from cause
    except ModuleNotFoundError as error:
        line = report(error, tmp_path, place(0), HashStore())
    assert re.fullmatch(
        r"megarl: rank 0: a package cannot be imported: RuntimeError: operator nms does not exist \(.*:\d+\); "
        "`megarl doctor` examines the installed packages",
        str(line),
    )
    assert "LlamaConfig" in (tmp_path / "errors" / "rank_0.txt").read_text(encoding="utf-8")


def test_rank_reports_its_own_different_error() -> None:
    store = HashStore()
    assert not reported_by_rank0(store, "no tokenizer", place(0))
    assert not reported_by_rank0(store, "no device", place(1))


def test_a_rank_speaks_if_the_store_has_gone() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    assert not reported_by_rank0(client, "no tokenizer", place(1))
