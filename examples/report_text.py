"""The lines of the report."""

import math
import textwrap

from measure import Accountant
from stdlib_text import Baselines

_MIB = 2**20


def loss_lines(metrics: dict[str, float], baselines: Baselines) -> list[str]:
    """Validation loss of the model, beside what frequencies alone reach on the same bytes."""
    rows = [
        ("byte frequencies", baselines.byte_frequency, math.exp(baselines.byte_frequency)),
        ("bigram table", baselines.bigram, math.exp(baselines.bigram)),
        ("this model", metrics["val_loss"], metrics["val_perplexity"]),
    ]
    heading = f"{'Validation':36}{'nats/byte':>16}{'perplexity':>16}"
    return [heading, *(f"  {name:34}{loss:16.3f}{perplexity:16.2f}" for name, loss, perplexity in rows)]


def traffic_lines(accountant: Accountant, num_ranks: int) -> list[str]:
    """What all ranks together send in one step: measured where the strategy has a recorder, and by formula."""
    traffic = accountant.traffic
    assert traffic is not None
    heading = f"{'Sent in one step, all ranks':36}{'elements':>16}{'MiB':>16}"
    formula = _traffic_row(f"formula {traffic.formula}", traffic.formula_numel)
    sizes = f"  N = {num_ranks}, P = {accountant.num_params:,}"
    if accountant.num_root_params is not None:
        sizes += f", P_root = {accountant.num_root_params:,}"
    if traffic.measured is None:
        return [heading, f"{formula}  (not measured)", sizes]
    numel, nbytes = (sum(getattr(sent, field) for sent in traffic.measured.values()) for field in ("numel", "nbytes"))
    agreement = "equal" if numel == traffic.formula_numel else f"measured {numel - traffic.formula_numel:+,}"
    return [
        heading,
        *(_traffic_row(name, sent.numel, sent.nbytes) for name, sent in traffic.measured.items()),
        _traffic_row("both", numel, nbytes),
        f"{formula}  {agreement}",
        _traffic_row("DDP, formula 2 (N-1) P", 2 * (num_ranks - 1) * accountant.num_params),
        sizes,
    ]


def _traffic_row(name: str, numel: int, nbytes: int | None = None) -> str:
    return f"  {name:34}{numel:16,}" + (f"{nbytes / _MIB:16.2f}" if nbytes is not None else "")


def memory_lines(accountant: Accountant) -> list[str]:
    """Memory of the rank that needs most, beside that of the unsharded model."""
    rank, memory = max(enumerate(accountant.memory_of_rank), key=lambda item: item[1].engine_peak_nbytes or 0)
    whole = accountant.num_params * accountant.param_itemsize
    category = memory.category_peak_nbytes or {}
    rows = [
        ("parameters", whole, category.get("sharded_param")),
        ("gradients", whole, category.get("sharded_grad")),
        ("AdamW moments", 2 * whole, memory.moments_nbytes),
        ("unsharded and in flight, at the peak", None, memory.working_set_nbytes),
        ("sum", 4 * whole, memory.total_nbytes),
    ]
    heading = f"{'Memory of a rank, MiB':38}{'unsharded model':>16}{f'rank {rank}':>14}"
    units = f"{'':38}{'computed':>16}{'measured':>14}"
    return [
        heading,
        units,
        *(f"  {name:36}{_mib(a):>16}{_mib(b):>14}" for name, a, b in rows),
        *_process_lines(accountant),
    ]


def _process_lines(accountant: Accountant) -> list[str]:
    def of_ranks(values: list[int | None]) -> str:
        return ", ".join(f"{(value or 0) / _MIB:,.0f}" for value in values)

    memories = accountant.memory_of_rank
    lines = [f"  peak resident memory of the process, by rank: {of_ranks([m.peak_rss_nbytes for m in memories])}"]
    if memories[0].device_peak_nbytes is not None:
        lines.append(f"  peak allocated on the device, by rank: {of_ranks([m.device_peak_nbytes for m in memories])}")
    return lines


def _mib(nbytes: int | None) -> str:
    return f"{nbytes / _MIB:.2f}" if nbytes is not None else "-"


def sample_lines(sample: str) -> list[str]:
    """What the model writes; bytes that a terminal cannot show become dots."""
    sample = "".join(char if char.isprintable() or char == "\n" else "·" for char in sample)
    return ["Sample", textwrap.indent(sample, "  | ", lambda line: True)]
