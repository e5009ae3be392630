"""Work that one rank of a node does for the others, with real processes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import RankPool
from tests.support.tiny import write_checkpoint

pytestmark = pytest.mark.ranks


def answers() -> tuple[str, int, list[str | None]]:
    """Do slow work on one rank; return the result, the rank that did it, and the notes of the watchdog."""
    from unittest.mock import patch

    from megarl.distributed import nodes

    told: list[str | None] = []

    def work(count: Callable[[int], None]) -> tuple[str, int]:
        import time

        for _ in range(4):
            time.sleep(0.2)
            count(10)
        return "done", os.getpid()

    def note(*, phase: str | None = None) -> str:
        told.append(phase)
        return "before"

    with patch("megarl.distributed.watchdog.note", note), patch.object(nodes, "TURN_S", 0.1):
        answer, pid = nodes.once_a_node(work, phase="fetch")
    return answer, pid, told


def of_two_nodes(directory: str) -> int:
    """Return the rank whose work this rank gets: ranks 0 and 1 are a node, rank 2 is another with the same name."""
    from unittest.mock import patch

    import torch.distributed as dist

    from megarl.distributed import nodes

    rank = dist.get_rank()
    boot = Path(directory, f"{rank // 2}")
    boot.write_text(f"{rank // 2}")
    with patch.object(nodes, "BOOT_ID", boot), patch.dict(os.environ, {"LOCAL_RANK": f"{rank % 2}"}):
        return nodes.once_a_node(lambda _: rank, phase="fetch")


def fails() -> str:
    from megarl.distributed.nodes import once_a_node

    def work(_: Any) -> None:
        raise ValueError("the disk is full")

    with pytest.raises(ValueError, match="the disk is full") as raised:
        once_a_node(work, phase="fetch")
    return str(raised.value)


def source(uri: str, cache: str) -> tuple[str, int, int]:
    """Return the directories of a model that is asked for twice, and how many times its files were copied."""
    os.environ["MEGARL_CACHE"] = cache
    from unittest.mock import patch

    from megarl.models.config import ModelSection
    from megarl.models.source import Source
    from megarl.platform.remote import RemoteDirectory

    with patch.object(RemoteDirectory, "download", autospec=True, side_effect=RemoteDirectory.download) as download:
        first, second = (Source.read(ModelSection(path=uri)) for _ in range(2))
    assert first == second
    return str(first.directory), download.call_count, first.architecture.num_layers


def test_all_ranks_see_answer_and_progress_of_one(pool: RankPool) -> None:
    found = pool.run(3, answers)
    assert {(answer, pid) for answer, pid, _ in found} == {("done", found[0][1])}
    for _, _, told in found:
        assert told.count("fetch") >= 4
        assert told[-1] == "before"


def test_nodes_may_have_one_name(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(3, of_two_nodes, str(tmp_path)) == [0, 0, 2]


def test_failure_of_one_rank_is_raised_on_all(pool: RankPool) -> None:
    assert pool.run(3, fails) == 3 * ["the disk is full"]


def test_model_at_uri_is_fetched_once_per_node(pool: RankPool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", "llama")
    found = pool.run(3, source, f"local://{model}", str(tmp_path / "cache"))
    assert len({directory for directory, _, _ in found}) == 1
    assert [count for _, count, _ in found] == [len(list(model.iterdir())), 0, 0]
