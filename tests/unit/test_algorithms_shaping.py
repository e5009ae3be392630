import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.shaping import overlong_penalty, scores_differ


def test_the_overlong_penalty_by_hand() -> None:
    penalty = overlong_penalty(torch.tensor([1, 12, 13, 14, 16, 17]), max_length=16, buffer=4, factor=2.0)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -0.5, -1.0, -2.0, -2.0]))


def test_groups_with_equal_scores_are_found_by_hand() -> None:
    scores, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 7.0]), torch.tensor([3, 3, 1, 1, 3, 2])
    assert scores_differ(scores, groups).tolist() == [True, True, False, False, True, False]


@given(samples=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=16))
def test_group_is_kept_if_its_scores_differ(samples: list[tuple[int, int]]) -> None:
    groups, scores = torch.tensor([group for group, _ in samples]), torch.tensor([float(s) for _, s in samples])
    expected = [len({score for other, score in samples if other == group}) > 1 for group, _ in samples]
    assert scores_differ(scores, groups).tolist() == expected
