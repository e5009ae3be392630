"""Reshards between real gloo processes, against slices of the full model."""

import re
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megarl.models.experts import Experts
from megarl.reshard.checksums import SyncError
from megarl.reshard.executor import Reshard
from megarl.reshard.layout import Piece, row_major, whole
from megarl.reshard.planner import plan_between
from tests.support.layouts import (
    TensorDestination,
    architecture,
    blank,
    engine_layouts,
    filled,
    index_valued,
    trainer_layouts,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.ranks
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Watched(TensorDestination):
    """A destination that counts open tensors, and checks that each is opened and closed once, in that order."""

    log: list[tuple[str, str]]

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


class Computed(dict[str, torch.Tensor]):
    """A source that makes each tensor when it is asked for, and counts those that exist."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.asked = []
        self.alive = weakref.WeakSet()
        self.most_alive = 0

    def __getitem__(self, param):
        self.asked.append(param)
        tensor = super().__getitem__(param).clone()
        self.alive.add(tensor)
        self.most_alive = max(self.most_alive, len(self.alive))
        return tensor


def reshard_model(trainer, engine, source_dtype, destination_dtype, bucket_bytes, two_level):
    rank, world = dist.get_rank(), dist.get_world_size()
    experts = Experts(num_experts=4, top_k=2, ffn_hidden_size=8, first_dense_layers=1) if "ep" in trainer else None
    model = architecture(num_layers=4, family="qwen3_moe" if experts else "qwen3", experts=experts)
    sources = trainer_layouts(model, **trainer, dp=world // trainer["tp"] // trainer["pp"], dtype=DTYPES[source_dtype])
    needs = engine_layouts(model, tp=engine, replicas=world // engine, dtype=DTYPES[destination_dtype])
    plan = plan_between(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=bucket_bytes, two_level=two_level)
    reshard = Reshard(plan, device=CPU)
    for shift in (0.0, 1.0):  # a second update finds no trace of the first
        checkpoint = {name: (tensor + shift) % 251 for name, tensor in index_valued(model).items()}
        destination = Watched(needs[rank], blank(needs[rank]))
        source = Computed(filled(sources[rank], checkpoint))
        report = reshard.run(source, destination, check=bool(shift))
        assert len(set(source.asked)) == len(source.asked), "a tensor was computed twice"
        for param, expected in filled(needs[rank], checkpoint).items():
            assert torch.equal(destination.tensors[param], expected), param
    assert (report.bytes_sent, report.bytes_received) == (plan.bytes_sent, plan.bytes_received)
    return report.num_waves, destination.most_open(), len(destination.tensors), source.most_alive, len(source)


@pytest.mark.parametrize(
    ("world", "trainer", "engine", "dtypes", "bucket_bytes", "two_level"),
    [
        (2, {"tp": 2, "pp": 1}, 1, ("float32", "float32"), 1 << 20, False),
        (2, {"tp": 1, "pp": 2}, 2, ("float32", "bfloat16"), 1024, False),
        (4, {"tp": 2, "pp": 2}, 2, ("float32", "bfloat16"), 1 << 20, False),
        (4, {"tp": 4, "pp": 1}, 2, ("bfloat16", "bfloat16"), 512, False),
        (4, {"tp": 2, "pp": 1}, 4, ("float32", "float32"), 640, False),
        (4, {"tp": 1, "pp": 4}, 1, ("bfloat16", "float32"), 1000, False),
        (4, {"tp": 2, "pp": 2}, 1, ("float32", "bfloat16"), 1000, True),
        (4, {"tp": 1, "pp": 4}, 1, ("bfloat16", "float32"), 2000, True),
        (8, {"tp": 2, "pp": 2}, 4, ("float32", "bfloat16"), 512, False),
        (8, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}, 2, ("float32", "bfloat16"), 1024, False),
        (8, {"tp": 1, "pp": 2, "ep": 2, "etp": 2}, 4, ("bfloat16", "bfloat16"), 1000, True),
    ],
)
def test_an_engine_gets_its_slices_of_the_trainer(pool, world, trainer, engine, dtypes, bucket_bytes, two_level):
    options = (*dtypes, bucket_bytes, two_level)
    for num_waves, most_open, num_tensors, most_read, num_sources in pool.run(
        world, reshard_model, trainer, engine, *options
    ):
        if bucket_bytes < 1 << 20:
            assert num_waves > 5
            assert most_open < num_tensors / 2
            assert most_read < num_sources / 2 + 1
        else:
            assert num_waves == 1


def silent_ranks():
    """Rank 0 sends to rank 2 only; ranks 1 and 3 have nothing to do, and one update is empty for everybody."""
    rank = dist.get_rank()
    box = whole((3, 5))
    layout = [Piece("w", box, "local", 0, row_major(box.shape), torch.float32)]
    for sources, needs in (([layout, [], [], []], [[], [], layout, []]), ([[]] * 4, [[]] * 4)):
        plan = plan_between(sources, needs, rank=rank, ranks_per_node=4, bucket_bytes=1 << 20)
        destination = TensorDestination(needs[rank], blank(needs[rank]))
        source = {"local": torch.arange(15.0)} if sources[rank] else {}
        report = Reshard(plan, device=CPU).run(source, destination)
        assert report.bytes_received == (60 if needs[rank] else 0)
        if needs[rank]:
            assert destination.tensors["local"].tolist() == list(range(15))


def test_ranks_without_bytes_for_each_other_stay_silent(pool):
    pool.run(4, silent_ranks)


def packs(rows, columns):
    """Rank 0 sends a box of up to 64 columns to rank 1; return whether it was packed into the bucket."""
    rank, box, tensor = dist.get_rank(), whole((rows, min(columns, 64))), torch.arange(float(rows * columns))
    piece = Piece("w", box, "local", 0, row_major((rows, columns)), torch.float32)
    needed = Piece("w", box, "there", 0, row_major(box.shape), torch.float32)
    sources, needs = [[piece], []], [[], [needed]]
    plan = plan_between(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=1 << 20)
    reshard, destination = Reshard(plan, device=CPU), TensorDestination(needs[rank], blank(needs[rank]))
    for bucket in reshard._send_buckets:
        bucket.fill_(7)
    reshard.run({"local": tensor} if rank == 0 else {}, destination)
    if rank == 1:
        assert torch.equal(needed.view(destination.tensors["there"]), piece.view(tensor))
    return bool((reshard._send_buckets[0] != 7).any())


@pytest.mark.parametrize(("shape", "is_packed"), [((4, 64), False), ((4, 128), True), ((3, 5), True)])
def test_box_filling_its_message_is_sent_in_place(pool, shape, is_packed):
    """The first box is all of its tensor, the second the left half of one; the third has no multiple of 16 bytes."""
    assert pool.run(2, packs, *shape) == [is_packed, False]


def different_plans():
    """Rank 1 has another bucket size, so its waves end at other steps."""
    rank = dist.get_rank()
    model = architecture()
    layouts = trainer_layouts(model, tp=2, pp=1), engine_layouts(model, tp=1, replicas=2)
    plan = plan_between(*layouts, rank=rank, ranks_per_node=2, bucket_bytes=4096 if rank else 2048)
    with pytest.raises(RuntimeError, match="the plans of the ranks differ"):
        Reshard(plan, device=CPU)


def test_different_plans_are_found_before_anything_is_sent(pool):
    pool.run(2, different_plans)


class FlippedBit(Reshard):
    """Rank 0 sends its first box with one flipped bit."""

    def _exchange(self, number, packed):
        if number == 0 and self._plan.rank == 0:
            self._buffers_of(0).sends.slots[0].view(torch.int32).view(-1)[3] ^= 1 << 7
        return super()._exchange(number, packed)


class Swapped(Reshard):
    """Rank 1 swaps gate and up."""

    def _buffers_of(self, number):
        load = super()._buffers_of(number)
        if self._plan.rank == 1 and self._wave_buffers[number] is load:
            cargo = load.receives
            gate, up = (
                next(i for i, transfer in enumerate(cargo.transfers) if f"{kind}_proj" in transfer.piece.name)
                for kind in ("gate", "up")
            )
            slots = list(cargo.slots)
            slots[gate], slots[up] = slots[up], slots[gate]
            return replace(load, receives=replace(cargo, slots=slots))
        return load


class WrongOffset(Reshard):
    """Rank 0 unpacks its last box one row too early."""

    def _unpack(self, number, opened, ledger):
        slot = self._buffers_of(number).receives.slots[-1]
        slot.set_(slot.untyped_storage(), slot.storage_offset() - 4 * (self._plan.rank == 0), slot.shape, slot.stride())
        super()._unpack(number, opened, ledger)


class LateWrite(Reshard):
    """Rank 1 overwrites an element of a copied box after the copy."""

    def _copy_own(self, number, source, opened, ledger):
        super()._copy_own(number, source, opened, ledger)
        if self._plan.rank == 1:
            copy = self._buffers_of(number).copies[0]
            copy.destination.view(opened[copy.destination.param]).view(-1)[0] += 1


FAULTS = {
    FlippedBit: r"embed_tokens.weight \[0:\d+, 0:8\] from rank 0 to rank 1",
    Swapped: r"layers.0.mlp.gate_proj.weight \[0:8, 0:8\] from rank 0 to rank 1",
    WrongOffset: r"\w+.weight \[\d+:\d+, .+\] from rank 1 to rank 0",
    LateWrite: r"\w+.weight \[\d+:\d+, .+\] from rank 1 to rank 1",
}


def reshard_with_a_fault(kind):
    rank = dist.get_rank()
    model = architecture(num_layers=1)
    sources, needs = trainer_layouts(model, tp=2, pp=1), engine_layouts(model, tp=1, replicas=2)
    plan = plan_between(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=1 << 20)
    source = filled(sources[rank], index_valued(model))
    with pytest.raises(SyncError) as caught:
        kind(plan, device=CPU).run(source, TensorDestination(needs[rank], blank(needs[rank])), check=True)
    return str(caught.value)


@pytest.mark.parametrize("kind", FAULTS)
def test_check_names_wrong_data_on_every_rank(kind, pool):
    messages = pool.run(2, reshard_with_a_fault, kind)
    assert messages[0] == messages[1]
    assert re.search(FAULTS[kind], messages[0]), messages[0]


def memory(num_layers):
    """Return the peak of torch's CPU allocations from here on, without a model many times as large as a bucket."""
    rank, bucket_bytes = dist.get_rank(), 8192
    model = architecture(num_layers=num_layers, hidden_size=64, ffn_hidden_size=256)
    sources, needs = trainer_layouts(model, tp=2, pp=1), engine_layouts(model, tp=1, replicas=2, dtype=torch.bfloat16)
    plan = plan_between(sources, needs, rank=rank, ranks_per_node=2, bucket_bytes=bucket_bytes)
    source = filled(sources[rank], index_valued(model))
    destination = TensorDestination(needs[rank], blank(needs[rank]))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        report = Reshard(plan, device=CPU).run(source, destination)
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, report


def test_reshard_memory_is_bounded_by_buckets(pool):
    small, large = (pool.run(2, memory, num_layers) for num_layers in (4, 32))
    for (peak, report), (peak_of_large, report_of_large) in zip(small, large, strict=True):
        assert report_of_large.bytes_received > 7 * report.bytes_received > 7 * 25 * 8192
        for most, bucket_bytes in ((peak, report.bucket_bytes), (peak_of_large, report_of_large.bucket_bytes)):
            assert 8192 < bucket_bytes <= 4 * 8192
            assert bucket_bytes <= most <= bucket_bytes + 1024
