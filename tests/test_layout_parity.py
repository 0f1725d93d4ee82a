"""The two layouts beside each other under the Trainer: the same bits, or rounding where sums run in another order."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import layouts
from tests.engine_cases import assert_close, assert_equal
from tests.models import Tiny, dealt_loader, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool


class Adam(Tiny):
    """With an optimizer of one kernel, or of one per operation."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # An eps above the rounding of gradients that are zero but for it; see `make_optimizer`.
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=self.fused)


def _fit(*, fused: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = seeded(Adam, fused=fused)
    trainer = make_trainer(max_epochs=2, **options)
    trainer.fit(model, dealt_loader(24, 3))
    return model.losses, weights(trainer)


def _in_both(ranks: RankPool, world_size: int, fused: bool, options: dict[str, Any]) -> list[Any]:
    results = []
    for layout in ("per_parameter", "flat"):
        with layouts.using(layout):
            results.append(ranks.run(_fit, world_size, fused=fused, options=options))
    return results


@pytest.mark.parametrize("world_size", [2, 3])
def test_losses_and_weights_are_equal_bit_for_bit(ranks: RankPool, world_size: int) -> None:
    rows, flat = _in_both(ranks, world_size, False, {})
    assert [losses for losses, _ in rows] == [losses for losses, _ in flat]
    assert_equal(rows[0][1], flat[0][1])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01}], ids=str)
def test_fused_optimizers_and_norm_clipping_differ_by_rounding(
    ranks: RankPool, fused: bool, options: dict[str, Any]
) -> None:
    rows, flat = _in_both(ranks, 2, fused, options)
    for (losses, _), (other_losses, _) in zip(rows, flat, strict=True):
        assert losses == pytest.approx(other_losses, abs=1e-6)
    assert_close(rows[0][1], flat[0][1], 1e-6)
