"""docs/protocol.md says what the server does and what it tells of tokens."""

from __future__ import annotations

import re
from typing import get_args

import foresay.server.api.responses.socket as socket_module
from foresay.server.api.responses.answer import TYPES
from foresay.server.api.responses.socket import ClientEvent, Closing
from foresay.server.api.responses.store import SocketLimits, StoreLimits
from foresay.server.schemas.chat import Source, StepProvenance, TokenProvenance
from tests.provenance.transcript import BEGIN, telling
from tests.responses import transcript

PAGE = transcript.PAGE.read_text("utf-8")


async def test_the_transcript_is_current():
    assert transcript.renewed(PAGE, await transcript.conversation()) == PAGE


def test_every_event_and_message_is_named():
    for type in (*TYPES, *(one.__struct_config__.tag for one in get_args(ClientEvent))):
        shown = re.sub(r"\.done$", ".added", type) if type.endswith("item.done") or type.endswith("part.done") else type
        assert f"`{shown}`" in PAGE or f"`{shown.removesuffix('.done')}.delta`, `.done`" in PAGE, type


def test_every_close_code_is_named():
    closings = [one for one in vars(socket_module).values() if isinstance(one, Closing)]
    rows = "\n".join(line.split("|")[1] for line in PAGE.splitlines() if re.match(r"\| 1\d{3}", line))
    assert len(closings) >= 5
    for closing in closings:
        assert str(int(closing.code)) in rows


def test_the_numbers_are_those_of_the_code():
    sockets, stored = SocketLimits(), StoreLimits()
    for number in (stored.bytes >> 20, sockets.most):
        assert re.search(rf"\b{number}\b", PAGE), number
    assert f"{stored.count:,}" in PAGE
    assert f"ping every {sockets.heartbeat:.0f} s" in PAGE
    assert f"{sockets.waiting} messages" in PAGE
    assert f"the client read nothing for {sockets.stall:.0f} s" in PAGE
    assert sockets.idle == 3600 and "for an hour" in PAGE


SECTION = PAGE.partition("\n## Where tokens come from\n")[2].partition("\n## ")[0]


async def test_the_transcript_of_provenance_is_current() -> None:
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
