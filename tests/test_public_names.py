"""The public names are the documented ones, and the engine starts without Lightning."""

import subprocess
import sys

import pytest

PUBLIC_NAMES = ["FullyShardedStrategy", "__version__", "unshard"]


def _run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_public_names_are_the_documented_ones() -> None:
    import fsdp_strategy

    assert sorted(fsdp_strategy.__all__) == sorted(PUBLIC_NAMES)


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_public_name_can_be_imported(name: str) -> None:
    import fsdp_strategy

    assert getattr(fsdp_strategy, name)


def test_the_engine_does_not_import_lightning() -> None:
    loaded = _run_python(
        "import sys, fsdp_strategy.engine\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('lightning', 'pytorch_lightning')])"
    )
    assert loaded == "[]"
