"""The states of all ranks' generators in one file."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from megarl.learner.randomness import load_random_states, write_random_states
from megarl.platform.small_files import Damage
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks


def saved(path: Path) -> list[float]:
    """Save the states of ranks that were seeded differently, and return what each draws next."""
    torch.manual_seed(dist.get_rank())
    tensor_parallel.get_cuda_rng_tracker().reset()
    write_random_states(path)
    return torch.rand(2).tolist()


def drawn(path: Path) -> list[float]:
    """Return what a rank draws with the states of a file that only the first rank can read."""
    torch.manual_seed(99 + dist.get_rank())
    load_random_states(path if dist.get_rank() == 0 else path.with_name("missing"))
    return torch.rand(2).tolist()


def refused(path: Path) -> str:
    with pytest.raises(Damage) as caught:
        load_random_states(path)
    return str(caught.value)


@pytest.mark.parametrize("num_saved", [1, 3])
def test_first_rank_alone_reads_all_states(pool: RankPool, tmp_path: Path, num_saved: int) -> None:
    before = pool.run(num_saved, saved, tmp_path / "states")
    unknown = [torch.rand(2, generator=torch.Generator().manual_seed(99 + rank)).tolist() for rank in range(3)]
    assert pool.run(3, drawn, tmp_path / "states") == before + unknown[num_saved:]
    assert pool.run(2, drawn, tmp_path / "states") == (before + unknown[num_saved:])[:2]


def test_damage_of_states_reaches_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "states").write_bytes(b"not a file of torch")
    messages = pool.run(2, refused, tmp_path / "states")
    assert "states" in messages[0]
    assert messages[0] == messages[1]
