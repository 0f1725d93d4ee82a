"""Ranks are forked before anything has touched the device, so that they can use it."""

import pytest
import torch

from tests.rank_pool import RankPool

pytestmark = pytest.mark.gpu


def _sum_on_device() -> float:
    return torch.ones(8, device="cuda").sum().item()


def test_ranks_share_the_device(ranks: RankPool) -> None:
    assert ranks.run(_sum_on_device, 2) == [8.0, 8.0]
