"""docs/options.md names every sampling option, and its proofs exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foresay.spec.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
TABLE = [line for line in (ROOT / "docs" / "options.md").read_text().splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_field_is_in_the_table(field: str) -> None:
    assert [line for line in TABLE if f"`{field}`" in line.split("|")[1]], f"docs/options.md says nothing of {field}"


@pytest.mark.parametrize("line", TABLE)
def test_every_proof_exists(line: str) -> None:
    proofs = line.split("|")[3]
    files = re.findall(r"`(tests/[\w/]+\.py)`", proofs)
    assert files
    sources = "".join((ROOT / file).read_text() for file in files)
    for name in re.findall(r"`(test_\w+)`", proofs):
        assert f"def {name}(" in sources, name
