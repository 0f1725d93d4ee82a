"""Tests in this folder need a CUDA device. Each file marks itself with `pytestmark = pytest.mark.gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
