"""Seeds are a pure function of what is asked."""

from megarl.rollout.sampling import request_seed


def test_request_seed_never_changes() -> None:
    assert request_seed(1, step=2, prompt_index=3, sample=4) == 7597657864365363701


def test_every_part_of_a_request_changes_its_seed() -> None:
    seeds = {
        request_seed(seed, step=step, prompt_index=index, sample=sample)
        for seed in (0, 1)
        for step in range(-1, 4)
        for index in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 2 * 5 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
