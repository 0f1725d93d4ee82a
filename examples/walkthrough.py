"""One training step, phase by phase: what every rank stores, and what it sends.

    python examples/walkthrough.py                          # 2 ranks, two layers of 4 weights each
    python examples/walkthrough.py --ranks 3 --weights 6

The model is two layers with one weight vector each, and each layer is a unit of its own. Every number in the tables is
read from the running engine: what is stored from the tensors and the engine's ledger at each of its events, what is
sent from its recorder. The only number that comes from a formula is DDP's, and it says so.
"""

import argparse
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import start_processes

from fsdp_strategy.engine import EngineConfig, Event, FullyShardedEngine, ShardMesh
from fsdp_strategy.engine.optimizer import LocalStep

NUM_LAYERS = 2
LEARNING_RATE = 0.1

# Events of the engine that change what a rank stores or sends, in the words of the tables.
PHASES = {
    "all_gather": "all-gather",
    "post_forward": "compute",
    "post_backward": "compute gradients",
    "reshard": "free",
    "reduce_scatter": "reduce-scatter",
    "wait_reduce_scatter": "keep the average",
}


class Layer(nn.Module):
    """Multiplies with its weights, elementwise."""

    def __init__(self, num_weights: int, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.arange(first, first + num_weights, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class TwoLayers(nn.Module):
    """w1, w2, ... in the first layer, and so on in the second."""

    def __init__(self, num_weights: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(num_weights, 1 + i * num_weights) for i in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class Row:
    """What a rank stores after a phase, and what it sent in it.

    Attributes:
        phase: in which direction, layer and part of the step.
        weights: per layer, the numbers of the stored weights, counted from 1.
        full_grads: elements of gradients of this rank's own data, before they are averaged.
        averaged: numbers of the weights whose averaged gradient is stored.
        num_moments: elements of optimizer state.
        sent: elements that this rank sent to other ranks.
    """

    phase: str
    weights: tuple[tuple[int, ...], ...]
    full_grads: int
    averaged: tuple[int, ...]
    num_moments: int
    sent: int


@dataclass(slots=True)
class Report:
    """One rank's step.

    Attributes:
        rows: the table.
        gathered: elements sent in all-gathers, as the recorder counts them.
        reduced: elements sent in reduce-scatters, as the recorder counts them.
        num_optimizer_events: collectives and anything else that the engine recorded while the optimizer stepped.
        own_grads: per layer, the gradients of this rank's data alone, from an unsharded copy of the model.
        averaged: per layer, this rank's shard of the averaged gradient.
        updated: per layer, this rank's shard of the weights after the step.
    """

    rows: list[Row] = field(default_factory=list)
    gathered: int = 0
    reduced: int = 0
    num_optimizer_events: int = 0
    own_grads: list[Tensor] = field(default_factory=list)
    averaged: list[Tensor] = field(default_factory=list)
    updated: list[Tensor] = field(default_factory=list)


def data_of(rank: int, num_weights: int) -> tuple[Tensor, Tensor]:
    """The rank's own mini-batch: one input, and the target of the sum of the outputs."""
    return torch.linspace(0.5, 1.5, num_weights) + 0.25 * rank, torch.tensor(1.0 + rank)


def loss_of(model: nn.Module, rank: int, num_weights: int) -> Tensor:
    """Squared error of the sum of the outputs."""
    x, y = data_of(rank, num_weights)
    return (model(x).sum() - y).square() / 2


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


class Walk(list[Event]):
    """Takes the place of the recorder's list of events, and looks at what is stored at every event."""

    def __init__(self, engine: FullyShardedEngine, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._engine, self._optimizer = engine, optimizer
        self._direction = "forward"

    def append(self, event: Event) -> None:
        """Called by the recorder."""
        super().append(event)
        if event.kind == "pre_backward":
            self._direction = "backward"
        if event.kind in PHASES:
            layer = 1 + int(event.unit.rsplit(".", 1)[1])
            self.look(f"{self._direction} layer {layer}: {PHASES[event.kind]}", event.sent_numel)

    def look(self, phase: str, sent: int = 0) -> None:
        """Add a row with what is stored now."""
        engine, params = self._engine, list(self._engine.params)
        numbers, first = [], 1
        for param in params:
            numbers.append(range(first, first + param.cut.spec.numel))
            first += param.cut.spec.numel
        own = [numbers[i][slice(*_rows(engine, i))] for i in range(len(params))]
        is_whole = [param.unsharded.untyped_storage().nbytes() > 0 for param in params]
        averaged = [n for param, mine in zip(params, own, strict=True) if param.sharded.grad is not None for n in mine]
        state = [value for values in self._optimizer.state.values() for value in values.values() if value.dim()]
        grad_nbytes = engine.live_nbytes["unsharded_grad"]
        self.rows.append(
            Row(
                phase,
                tuple(tuple(numbers[i] if is_whole[i] else own[i]) for i in range(len(params))),
                grad_nbytes // params[0].unsharded.element_size(),
                tuple(averaged),
                sum(value.numel() for value in state),
                sent,
            )
        )


def _rows(engine: FullyShardedEngine, index: int) -> tuple[int, int]:
    """The elements of a 1-D parameter that this rank owns."""
    return list(engine.params)[index].cut.bounds(engine.mesh.shard_rank)


def walk(num_weights: int) -> Report:
    """Train two steps on this rank of the default process group, and watch the second, when optimizer state exists."""
    model = TwoLayers(num_weights)
    engine = FullyShardedEngine(model, ShardMesh(torch.device("cpu")), EngineConfig(units="Layer", prefetch_limit=0))
    optimizer = make_optimizer(model)
    LocalStep(optimizer, engine.params)
    rank, report = engine.mesh.shard_rank, Report()
    loss_of(model, rank, num_weights).backward()
    optimizer.step()
    optimizer.zero_grad()
    copy = TwoLayers(num_weights)
    copy.load_state_dict({fqn: param.full_tensor() for fqn, param in model.state_dict().items()})  # type: ignore[attr-defined]
    loss_of(copy, rank, num_weights).backward()
    report.own_grads = [layer.weight.grad for layer in copy.layers]
    with engine.record() as recorder:
        recorder.events = steps = Walk(engine, optimizer)
        steps.look("before")
        loss = loss_of(model, rank, num_weights)
        steps.look("loss")
        loss.backward()
        num_events = len(steps)
        optimizer.step()
        report.num_optimizer_events = len(steps) - num_events
        steps.look("optimizer step", sum(event.sent_numel for event in steps[num_events:]))
        report.averaged = [param.grad.to_local().clone() for param in model.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad()
        steps.look("after")
        report.gathered, report.reduced = recorder.sent_numel("all_gather"), recorder.sent_numel("reduce_scatter")
    report.rows, report.updated = steps.rows, [param.local.clone() for param in engine.params]
    return report


def unsharded_update(num_ranks: int, num_weights: int) -> list[Tensor]:
    """The weights after the same two steps of one unsharded model on the average of all ranks' gradients."""
    model = TwoLayers(num_weights)
    optimizer = make_optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            loss_of(model, rank, num_weights).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= num_ranks
        optimizer.step()
    return [layer.weight.detach() for layer in model.layers]


# -- printing ----------------------------------------------------------------------------------------------------------


def _span(numbers: Sequence[int], letter: str) -> str:
    if not numbers:
        return "-"
    if len(numbers) <= 4:
        return " ".join(f"{letter}{n}" for n in numbers)
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return " ".join(f"{letter}{a}" if a == b else f"{letter}{a}..{letter}{b}" for a, b in runs)


def table_lines(rank: int, rows: Sequence[Row]) -> list[str]:
    """What one rank stores after each phase."""
    cells = [("", *(f"W{i + 1}" for i in range(NUM_LAYERS)), "own gradients", "averaged", "moments", "sent")]
    for row in rows:
        weights = [_span(numbers, "w") for numbers in row.weights]
        counts = [f"{count}" if count else "-" for count in (row.num_moments, row.sent)]
        cells.append((row.phase, *weights, f"{row.full_grads or '-'}", _span(row.averaged, "g"), *counts))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return [f"Rank {rank} stores after each phase, and sends in it (elements)", *lines]


def _joined(shards: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(list(pieces)) for pieces in zip(*shards, strict=True)]


def _apart(first: Sequence[Tensor], second: Sequence[Tensor]) -> str:
    difference = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    return "equal" if difference == 0 else f"equal to within {difference:.1e}"


def summary_lines(reports: Sequence[Report], num_weights: int) -> list[str]:
    """What each rank sent, beside DDP, and that the numbers are those of unsharded training."""
    num_ranks, num_params = len(reports), NUM_LAYERS * num_weights
    means = [sum(report.own_grads[i] for report in reports) / num_ranks for i in range(NUM_LAYERS)]
    averaged, updated = _joined([r.averaged for r in reports]), _joined([r.updated for r in reports])
    lines = ["Sent in the step (elements)"]
    for rank, report in enumerate(reports):
        total = report.gathered + report.reduced
        lines.append(f"  rank {rank}: {total} = {report.gathered} gathered + {report.reduced} reduced")
    ddp = 2 * (num_ranks - 1) / num_ranks * num_params
    lines.append(f"  DDP, by the formula 2 (N-1)/N P for N = {num_ranks}, P = {num_params}: {ddp:g}")
    events = sum(report.num_optimizer_events for report in reports)
    return [
        *lines,
        "",
        f"Collectives in the optimizer step: {events}",
        f"Averaged gradients and the mean of the ranks' own: {_apart(averaged, means)}",
        f"Updated weights and those of unsharded training: {_apart(updated, unsharded_update(num_ranks, num_weights))}",
    ]


def text_of(reports: Sequence[Report], num_weights: int) -> str:
    """All tables and the summary."""
    tables = [table_lines(rank, report.rows) for rank, report in enumerate(reports)]
    return "\n\n".join("\n".join(lines) for lines in [*tables, summary_lines(reports, num_weights)])


def _run_rank(rank: int, num_ranks: int, num_weights: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    report = walk(num_weights)
    dist.destroy_process_group()
    Path(folder, f"report-{rank}").write_bytes(pickle.dumps(report))


def run_ranks(num_ranks: int, num_weights: int) -> list[Report]:
    """Fork the ranks, let each walk, and collect what they saw."""
    torch.set_num_threads(1)  # a forked rank must not inherit a thread pool
    with tempfile.TemporaryDirectory() as folder:
        args: tuple[Any, ...] = (num_ranks, num_weights, folder)
        start_processes(_run_rank, args, nprocs=num_ranks, start_method="fork")
        return [pickle.loads(Path(folder, f"report-{rank}").read_bytes()) for rank in range(num_ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--weights", type=int, default=4, help="of each of the two layers")
    options = parser.parse_args()
    print(text_of(run_ranks(options.ranks, options.weights), options.weights))


if __name__ == "__main__":
    main()
