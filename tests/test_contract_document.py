"""`docs/contract.md` names tests that exist, and parameters that they have."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "contract.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`(?: \[([^\]]+)\])?")


def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_named_in_the_contract_exists() -> None:
    named = NAMED.findall(DOCUMENT)
    assert len(named) > 60
    assert [f"{path}::{name}" for path, name, _ in named if name not in _functions(path)] == []


def test_every_row_names_a_test_or_says_why_not() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| ") and not line.startswith("| FSDP2 test")]
    assert len(rows) > 60
    assert [
        row for row in rows if "`tests/" not in row and "Does not apply" not in row and "Not supported" not in row
    ] == []
