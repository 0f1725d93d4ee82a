"""What the README says of the code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _refusals() -> list[str]:
    """The beginnings of messages in the README's table of refusals."""
    section = (ROOT / "README.md").read_text().split("## What it refuses")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|") and "---" not in line]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row[2])]


def test_every_refusal_in_the_readme_is_a_message_of_the_code() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "fsdp_strategy").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)  # messages are broken into several literals
    refusals = _refusals()
    assert len(refusals) > 15
    assert [message for message in refusals if message not in joined] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
