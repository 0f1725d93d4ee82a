"""What a test must leave as it found it in the pytest process: the environment and torch's process group."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist

# Set on the way by whoever asks first, with no meaning for the next test.
NOT_A_LEAK = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}


@contextmanager
def process_restored() -> Iterator[list[str]]:
    """Undo on exit what the block left behind, and list it in what `as` bound."""
    leaks: list[str] = []
    before = dict(os.environ)
    try:
        yield leaks
    finally:
        leaks += _changed(before, os.environ)
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
            leaks.append("an initialised process group")


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    names = sorted((before.keys() | after.keys()) - NOT_A_LEAK)
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names if before.get(name) != after.get(name)
    ]
