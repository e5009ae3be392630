"""The peak of a piece of work: what it holds at once, not what it takes in turn, nor what was there before."""

import torch

from megarl.weight_sync.memory import MemoryMeter

CPU = torch.device("cpu")


def test_the_peak_is_what_is_held_at_once() -> None:
    held = [torch.zeros(250_000), torch.zeros(250_000)]  # a megabyte each

    def replace_all_and_take_some() -> None:
        for place in range(len(held)):
            held[place] = torch.ones(250_000)  # the new one is there before the old one goes
        for _ in range(3):
            torch.zeros(50_000)

    meter = MemoryMeter(CPU)
    with meter.recording():
        for _ in range(2):
            with meter.measured():
                replace_all_and_take_some()
            torch.zeros(900_000)  # outside the block
    assert meter.peak_bytes == 1_000_000
