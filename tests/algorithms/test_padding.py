"""Where padding stands, and positions beside it."""

import pytest
import torch

from algorithms.padding import join, positions, to_right

IDS = torch.tensor([[9, 0, 5, 6], [1, 2, 3, 4], [9, 9, 9, 7], [9, 9, 9, 9]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]])


def test_rows_are_rolled_to_the_left_with_their_masks() -> None:
    ids, mask = to_right(IDS, MASK)
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)] == [
        [0, 5, 6],
        [1, 2, 3, 4],
        [7],
        [],
    ]
    assert ids.shape == IDS.shape and ids.dtype == IDS.dtype and mask.dtype == MASK.dtype


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_masks_of_any_kind_are_rolled(dtype: torch.dtype) -> None:
    _, mask = to_right(IDS, MASK.to(dtype))
    assert mask.dtype == dtype and mask.sum(1).tolist() == [3, 4, 1, 0]


def test_positions_count_real_tokens_only() -> None:
    assert positions(MASK).tolist() == [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_prompt_is_joined_with_its_response_and_all_of_the_response_is_seen() -> None:
    ids, mask = join(IDS, MASK, torch.tensor([[7, 8]] * 4))
    assert ids[0].tolist() == [9, 0, 5, 6, 7, 8] and mask[0].tolist() == [0, 1, 1, 1, 1, 1]
