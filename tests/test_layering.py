"""The source obeys its rules, and each rule catches what it forbids."""

from functools import cache
from pathlib import Path

import pytest

from tests import source_rules as rules
from tests.source_rules import RULES, Rule

ROOT = Path(__file__).parent.parent
FOLDERS = ("fsdp_strategy", "tests", "examples", "benchmarks")

ENGINE = "fsdp_strategy/engine/unit.py"
TOP = "fsdp_strategy/strategy.py"

FORBIDDEN: list[tuple[Rule, str, str]] = [
    (rules.uses_no_rival, TOP, "import torch.distributed.fsdp"),
    (rules.uses_no_rival, TOP, "import torch.distributed.fsdp as rival"),
    (rules.uses_no_rival, TOP, "from torch.distributed import fsdp"),
    (rules.uses_no_rival, TOP, "from torch.distributed.fsdp import fully_shard"),
    (rules.uses_no_rival, TOP, "from torch.distributed.fsdp.wrap import *"),
    (rules.uses_no_rival, TOP, "def late():\n    from torch.distributed.fsdp import MixedPrecision"),
    (rules.uses_no_rival, TOP, "from torch.distributed._composable.fsdp import fully_shard"),
    (rules.uses_no_rival, TOP, "from torch.distributed._composable import fsdp"),
    (rules.uses_no_rival, TOP, "import torch\ntorch.distributed.fsdp.fully_shard(model)"),
    (rules.uses_no_rival, TOP, "import torch.distributed as dist\ndist.fsdp.fully_shard(model)"),
    (rules.uses_no_rival, TOP, "import importlib\nimportlib.import_module('torch.distributed.fsdp')"),
    (rules.uses_no_rival, TOP, "__import__('torch.distributed.fsdp')"),
    (rules.uses_no_rival, "examples/train.py", "from torch.distributed.fsdp import fully_shard"),
    (rules.uses_no_rival, "tests/test_parity.py", "from torch.distributed.fsdp import fully_shard"),
    (rules.lightning_stays_at_the_top, ENGINE, "import lightning"),
    (rules.lightning_stays_at_the_top, ENGINE, "from lightning.pytorch import Trainer"),
    (rules.lightning_stays_at_the_top, ENGINE, "import lightning.fabric.utilities as utilities"),
    (rules.lightning_stays_at_the_top, "fsdp_strategy/insight/planner.py", "def late():\n    import pytorch_lightning"),
    (rules.lightning_stays_at_the_top, "fsdp_strategy/checkpoint/full.py", "import lightning_utilities"),
    (rules.lightning_stays_at_the_top, ENGINE, "from importlib import import_module\nimport_module('lightning')"),
    (rules.arrows_go_down, ENGINE, "import fsdp_strategy"),
    (rules.arrows_go_down, ENGINE, "import fsdp_strategy.strategy"),
    (rules.arrows_go_down, ENGINE, "import fsdp_strategy.engine_room"),
    (rules.arrows_go_down, ENGINE, "from fsdp_strategy import FullyShardedStrategy"),
    (rules.arrows_go_down, ENGINE, "from .. import strategy"),
    (rules.arrows_go_down, ENGINE, "from ..strategy import FullyShardedStrategy"),
    (rules.arrows_go_down, ENGINE, "from fsdp_strategy.checkpoint import full"),
    (rules.arrows_go_down, "fsdp_strategy/engine/inner/deep.py", "from ...insight import planner"),
    (rules.arrows_go_down, "fsdp_strategy/checkpoint/full.py", "from fsdp_strategy.insight import planner"),
    (rules.arrows_go_down, "fsdp_strategy/insight/planner.py", "from ..checkpoint import full"),
    (rules.arrows_go_down, "fsdp_strategy/insight/planner.py", "from fsdp_strategy.callbacks import ShardingMonitor"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.all_gather_into_tensor(a, b)"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch\ntorch.distributed.all_gather_single(a, b)"),
    (
        rules.collectives_are_in_one_file,
        ENGINE,
        "from torch import distributed\ndistributed.reduce_scatter_tensor(a, b)",
    ),
    (rules.collectives_are_in_one_file, ENGINE, "from torch.distributed import all_reduce"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\noperation = dist.broadcast"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ngetattr(dist, 'barrier')()"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.P2POp(dist.isend, a, 1)"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.all_to_all_single(a, b)"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.all_gather_object(a, b)"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.broadcast_object_list(a)"),
    (rules.collectives_are_in_one_file, ENGINE, "from torch.distributed.distributed_c10d import irecv"),
    (rules.collectives_are_in_one_file, ENGINE, "from torch.distributed._functional_collectives import all_reduce"),
    (rules.groups_are_made_in_one_file, ENGINE, "import torch.distributed as dist\ndist.new_group([0, 1])"),
    (rules.groups_are_made_in_one_file, ENGINE, "from torch.distributed import new_group as make\nmake([0])"),
    (
        rules.groups_are_made_in_one_file,
        ENGINE,
        "from torch.distributed.device_mesh import DeviceMesh\nDeviceMesh('cpu', [0])",
    ),
    (
        rules.groups_are_made_in_one_file,
        ENGINE,
        "from torch.distributed import DeviceMesh\nDeviceMesh.from_group(group, 'cpu')",
    ),
    (
        rules.groups_are_made_in_one_file,
        ENGINE,
        "from torch.distributed.device_mesh import init_device_mesh\ninit_device_mesh('cpu', (2,))",
    ),
    (rules.streams_are_in_one_file, ENGINE, "import torch\nstream = torch.cuda.Stream()"),
    (rules.streams_are_in_one_file, ENGINE, "import torch\nevent = torch.cuda.Event()"),
    (rules.streams_are_in_one_file, ENGINE, "import torch\ntorch.cuda.current_stream().synchronize()"),
    (rules.streams_are_in_one_file, ENGINE, "import torch\nwith torch.cuda.stream(side): pass"),
    (rules.streams_are_in_one_file, ENGINE, "from torch.cuda import Event"),
    (rules.streams_are_in_one_file, ENGINE, "import torch\ntorch.accelerator.current_stream()"),
    (rules.streams_are_in_one_file, ENGINE, "import torch\ntorch.Stream()"),
    (rules.files_are_short, ENGINE, "pass\n" * 401),
    (rules.functions_are_short, ENGINE, "def long():\n" + "    pass\n" * 59),
    (rules.functions_are_short, ENGINE, "class Unit:\n  async def long(self):\n" + "    pass\n" * 59),
]

ALLOWED: list[tuple[Rule, str, str]] = [
    (rules.uses_no_rival, "benchmarks/race.py", "from torch.distributed.fsdp import fully_shard"),
    (rules.uses_no_rival, TOP, '"""Never calls torch.distributed.fsdp."""'),
    (rules.uses_no_rival, "tests/test_imports.py", "import sys\nassert 'torch.distributed.fsdp' not in sys.modules"),
    (rules.lightning_stays_at_the_top, TOP, "import lightning"),
    (rules.lightning_stays_at_the_top, "fsdp_strategy/__init__.py", "import lightning"),
    (rules.arrows_go_down, TOP, "from fsdp_strategy.insight import planner"),
    (rules.arrows_go_down, ENGINE, "from fsdp_strategy.engine.layout import shard_bounds"),
    (rules.arrows_go_down, ENGINE, "from . import layout\nfrom .layout import shard_bounds"),
    (rules.arrows_go_down, ENGINE, "from fsdp_strategy import engine"),
    (rules.arrows_go_down, ENGINE, "import fsdp_strategy.engine.layout as layout"),
    (rules.arrows_go_down, ENGINE, "import fsdp_strategy.engine.layout"),
    (
        rules.arrows_go_down,
        "fsdp_strategy/checkpoint/full.py",
        "from ..engine import layout\nfrom .convert import merge",
    ),
    (
        rules.collectives_are_in_one_file,
        "fsdp_strategy/engine/collectives.py",
        "import torch.distributed as dist\ndist.all_reduce(a)",
    ),
    (rules.collectives_are_in_one_file, ENGINE, "from .collectives import all_gather\nall_gather(a)"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch.distributed as dist\ndist.get_rank()\ndist.ReduceOp.SUM"),
    (rules.collectives_are_in_one_file, ENGINE, "import torch\ntorch.broadcast_tensors(a, b)"),
    (
        rules.groups_are_made_in_one_file,
        "fsdp_strategy/engine/mesh.py",
        "import torch.distributed as dist\ndist.new_group([0])",
    ),
    (
        rules.groups_are_made_in_one_file,
        ENGINE,
        "from torch.distributed import DeviceMesh, ProcessGroup\ndef f(mesh: DeviceMesh) -> ProcessGroup: ...",
    ),
    (rules.streams_are_in_one_file, "fsdp_strategy/engine/streams.py", "import torch\ntorch.cuda.Stream()"),
    (
        rules.streams_are_in_one_file,
        ENGINE,
        "import torch\nfrom .streams import Event\nEvent()\ntorch.cuda.is_available()",
    ),
    (rules.files_are_short, ENGINE, "pass\n" * 400),
    (rules.functions_are_short, ENGINE, "@decorator\ndef long():\n" + "    pass\n" * 58),
]


@cache
def _sources() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None)


def test_the_rules_see_the_package() -> None:
    assert any(path.startswith("fsdp_strategy/engine/") for path in _sources())
    assert "tests/test_layering.py" in _sources()


@pytest.mark.parametrize("rule", RULES, ids=_name)
def test_every_file_obeys(rule: Rule) -> None:
    found = [line for path, source in _sources().items() for line in rule(path, source)]
    assert not found, f"{rule.__doc__}\n" + "\n".join(found)


@pytest.mark.parametrize(("rule", "path", "source"), FORBIDDEN, ids=_name)
def test_what_a_rule_forbids_is_caught(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED, ids=_name)
def test_what_a_rule_allows_passes(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source) == []


def test_every_rule_has_been_seen_to_fail() -> None:
    assert {rule for rule, _, _ in FORBIDDEN} == set(RULES)


def test_what_was_found_is_named_with_file_and_line() -> None:
    found = rules.collectives_are_in_one_file(ENGINE, "import torch.distributed as dist\n\ndist.all_reduce(a)\n")
    assert found == ["fsdp_strategy/engine/unit.py:3: torch.distributed.all_reduce"]
