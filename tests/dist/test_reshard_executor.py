"""Reshards between real gloo processes, against slices of the full model."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megarl.reshard.executor import Reshard, TensorDestination
from megarl.reshard.layout import Piece, row_major, whole
from megarl.reshard.planner import make_plan
from tests.layouts import architecture, blank, engine_layouts, filled, index_valued, trainer_layouts
from tests.ranks import RankPool

CPU = torch.device("cpu")
pytestmark = pytest.mark.dist
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def pool():
    with RankPool(4) as ranks:
        yield ranks


class Watched(TensorDestination):
    """Notes how many local tensors are open at once, and that each is opened and closed once, in that order."""

    def __init__(self, pieces, tensors):
        super().__init__(pieces, tensors)
        object.__setattr__(self, "log", [])

    def open(self, param):
        self.log.append(("open", param))
        return super().open(param)

    def close(self, param):
        self.log.append(("close", param))

    def most_open(self):
        now = most = 0
        for event, _ in self.log:
            now += 1 if event == "open" else -1
            most = max(most, now)
        assert now == 0
        assert len(set(self.log)) == len(self.log)
        return most


def reshard_model(trainer, engine, source_dtype, destination_dtype, bucket_bytes):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = architecture(num_layers=4)
    sources = trainer_layouts(model, **trainer, dp=world // trainer["tp"] // trainer["pp"], dtype=DTYPES[source_dtype])
    needs = engine_layouts(model, tp=engine, replicas=world // engine, dtype=DTYPES[destination_dtype])
    plan = make_plan(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=bucket_bytes)
    reshard = Reshard(plan, device=CPU)
    for shift in (0.0, 1.0):  # a second update finds no trace of the first
        checkpoint = {name: (tensor + shift) % 251 for name, tensor in index_valued(model).items()}
        destination = Watched(needs[rank], blank(needs[rank]))
        report = reshard.run(filled(sources[rank], checkpoint), destination)
        for param, expected in filled(needs[rank], checkpoint).items():
            assert torch.equal(destination.tensors[param], expected), param
    assert (report.bytes_sent, report.bytes_received) == (plan.bytes_sent, plan.bytes_received)
    return report.num_waves, destination.most_open(), len(destination.tensors)


@pytest.mark.parametrize(
    ("world", "trainer", "engine", "dtypes", "bucket_bytes"),
    [
        (2, {"tp": 2, "pp": 1}, 1, ("float32", "float32"), 1 << 20),
        (2, {"tp": 1, "pp": 2}, 2, ("float32", "bfloat16"), 1024),
        (4, {"tp": 2, "pp": 2}, 2, ("float32", "bfloat16"), 1 << 20),
        (4, {"tp": 4, "pp": 1}, 2, ("bfloat16", "bfloat16"), 512),
        (4, {"tp": 2, "pp": 1}, 4, ("float32", "float32"), 640),
        (4, {"tp": 1, "pp": 4}, 1, ("bfloat16", "float32"), 1000),
    ],
)
def test_an_engine_gets_its_slices_of_the_trainer(pool, world, trainer, engine, dtypes, bucket_bytes):
    for num_waves, most_open, num_tensors in pool.run(world, reshard_model, trainer, engine, *dtypes, bucket_bytes):
        if bucket_bytes < 1 << 20:
            assert num_waves > 5
            assert most_open < num_tensors / 2
        else:
            assert num_waves == 1


def silent_ranks():
    """Rank 0 sends to rank 2 only; ranks 1 and 3 have nothing to do, and one update is empty for everybody."""
    rank = dist.get_rank()
    box = whole((3, 5))
    layout = [Piece("w", box, "local", 0, row_major(box.shape), torch.float32)]
    for sources, needs in (([layout, [], [], []], [[], [], layout, []]), ([[]] * 4, [[]] * 4)):
        plan = make_plan(sources, needs, rank=rank, ranks_per_node=4, bucket_bytes=1 << 20)
        destination = TensorDestination(needs[rank], blank(needs[rank]))
        source = {"local": torch.arange(15.0)} if sources[rank] else {}
        report = Reshard(plan, device=CPU).run(source, destination)
        assert report.bytes_received == (60 if needs[rank] else 0)
        if needs[rank]:
            assert destination.tensors["local"].tolist() == list(range(15))


def test_ranks_without_bytes_for_each_other_stay_silent(pool):
    pool.run(4, silent_ranks)


def different_plans():
    """Rank 1 believes in another bucket size, so its waves end elsewhere."""
    rank = dist.get_rank()
    model = architecture()
    layouts = trainer_layouts(model, tp=2, pp=1), engine_layouts(model, tp=1, replicas=2)
    plan = make_plan(*layouts, rank=rank, ranks_per_node=2, bucket_bytes=4096 if rank else 2048)
    with pytest.raises(RuntimeError, match="the ranks have different plans"):
        Reshard(plan, device=CPU)


def test_different_plans_are_found_before_anything_is_sent(pool):
    pool.run(2, different_plans)


def memory():
    """Peak of what torch allocates on the CPU from here on, beside a model 100 times as large as a bucket."""
    rank, bucket_bytes = dist.get_rank(), 8192
    model = architecture(num_layers=8, hidden_size=64, ffn_hidden_size=256)
    sources, needs = trainer_layouts(model, tp=2, pp=1), engine_layouts(model, tp=1, replicas=2, dtype=torch.bfloat16)
    plan = make_plan(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=bucket_bytes)
    source = filled(sources[rank], index_valued(model))
    destination = TensorDestination(needs[rank], blank(needs[rank]))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        Reshard(plan, device=CPU).run(source, destination)
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, bucket_bytes, plan.bytes_received


def test_a_reshard_needs_its_buckets_and_nothing_else(pool):
    for peak, bucket_bytes, received in pool.run(2, memory):
        assert received > 50 * bucket_bytes
        assert 2 * bucket_bytes < peak <= 4 * bucket_bytes + 1024
