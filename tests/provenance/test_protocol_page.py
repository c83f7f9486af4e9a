"""docs/protocol.md says what is told."""

from __future__ import annotations

import re
from typing import get_args

from foresay.server.schemas.tokens import Source, StepProvenance, TokenProvenance
from tests.provenance.transcript import BEGIN, telling
from tests.responses import transcript

PAGE = transcript.PAGE.read_text("utf-8")
SECTION = PAGE.partition("\n## Where tokens come from\n")[2].partition("\n## ")[0]


async def test_the_transcript_is_current() -> None:
    assert transcript.renewed(PAGE, await telling(), BEGIN) == PAGE


def fields_of(table: str) -> list[str]:
    """What the first column of a table names, behind its heading."""
    rows = SECTION.partition(f"| `{table}[]` |")[2].partition("\n\n")[0]
    return [name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


def test_every_field_is_described() -> None:
    assert fields_of("steps") == list(StepProvenance.__struct_fields__)
    assert sorted(fields_of("tokens")) == sorted(TokenProvenance.__struct_fields__)
    for source in get_args(Source):
        assert f"`{source}`" in SECTION


def test_a_stop_string_is_shown_to_discard() -> None:
    assert re.search(r'"discarded": [1-9]', SECTION)
