"""Models that are compiled, in whole or in part, before they are sharded: as with DDP."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layouts import both_layouts
from tests.models import TinyWithStages, loader, seeded
from tests.pooled_trainer import make_trainer, weights
from tests.rank_pool import RankPool

pytestmark = both_layouts


class WrappedBlocks(TinyWithStages):
    """Each block is replaced by its compiled one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend="aot_eager", fullgraph=True) for block in self.blocks)


class WholeGraphs(TinyWithStages):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager", fullgraph=True)


class CompiledRoot(TinyWithStages):
    """The module itself is compiled, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="aot_eager")


class CompiledBlocks(TinyWithStages):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class CompiledInside(TinyWithStages):
    """The blocks lie in a module that is compiled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.blocks)
        del self.blocks
        self.body = torch.compile(self.body, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x + self.shift)))


LOOPS = {
    "blocks": CompiledBlocks,
    "blocks wrapped, fullgraph": WrappedBlocks,
    "blocks, fullgraph": WholeGraphs,
    "module": CompiledRoot,
    "submodule with all blocks": CompiledInside,
}


def _fit(strategy: str, name: str) -> tuple[list[float], dict[str, Any]]:
    model = seeded(LOOPS[name])
    trainer = make_trainer(strategy)
    with warnings.catch_warnings():
        # Dynamo looks at `.grad` of inputs and hides the warning from users, but not from a filter that raises.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        trainer.fit(model, loader(24, 2), loader(7, 2))
    return model.losses, weights(trainer)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_compiled_model_trains_as_with_ddp(ranks: RankPool, world_size: int, name: str) -> None:
    with ranks.timeout(40):
        ours, ddp = ranks.run(_fit, world_size, "ours", name), ranks.run(_fit, world_size, "ddp", name)
    for (losses, params), (ddp_losses, ddp_params) in zip(ours, ddp, strict=True):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(ddp_losses), rtol=1e-4, atol=1e-5)
        if params:
            torch.testing.assert_close(params, ddp_params, rtol=1e-4, atol=1e-5)
