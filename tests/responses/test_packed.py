"""MessagePack that no JSON could be, or that is too much."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from foresay.server.api.responses.events import Create
from foresay.server.api.responses.send_queue import JSON_PROTOCOL, MSGPACK_PROTOCOL, check_packed, codec_of
from foresay.server.schemas.bounds import MOST_PARTS
from foresay.spec.errors import InvalidRequest

ASK: dict[str, Any] = {"type": "response.create", "model": "toy", "input": "x"}
CODEC = codec_of(MSGPACK_PROTOCOL)


def read(message: bytes):
    """As a socket does."""
    CODEC.weigh(message)
    return CODEC.decode(message)


pack = msgspec.msgpack.encode


@pytest.mark.parametrize("field", ["chat_template_kwargs", "unknown", "tools", "metadata", "input"])
@pytest.mark.parametrize(
    "value",
    [msgspec.msgpack.Ext(5, b"x"), b"bytes", {3: 1}, {"a": [{2.5: 1}]}, {"a": msgspec.msgpack.Ext(200 - 256, b"")}],
    ids=["ext", "bin", "a number as a name", "deeper", "a long ext"],
)
def test_what_json_could_not_be_is_refused(field, value):
    with pytest.raises(InvalidRequest):
        read(pack(ASK | {field: value}))


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x01", b"\xc0", b"\xa0"])
def test_too_many_values_are_refused_before_they_are_made(filler):
    count = 4_000_000
    body = b"\x82" + pack("type") + pack("response.create") + pack("unknown") + b"\xdd" + count.to_bytes(4, "big")
    with pytest.raises(InvalidRequest, match=f"{MOST_PARTS:,}"):
        read(body + filler * count)


def test_too_deep_is_refused():
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read(b"\x81" + pack("a") + b"\x91" * 100_000)
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        codec_of(JSON_PROTOCOL).weigh('{"a":' + "[" * 300 + "]" * 300 + "}")


@pytest.mark.parametrize("codec", [CODEC, codec_of(JSON_PROTOCOL)], ids=["packed", "json"])
def test_a_value_that_looks_like_a_complaint_does_not_rename_its_field(codec):
    with pytest.raises(InvalidRequest) as caught:
        codec.decode(codec.encode(ASK | {"spec_decode_metrics": "x' - at `$.model`"}))
    assert caught.value.param == "spec_decode_metrics"


def test_what_is_right_passes():
    many = {str(number): ["x" * number, number, -number, number * 10**9, 0.5, None, True] for number in range(300)}
    check_packed(pack({"a": many, "b": [[], {}, "ü" * 70_000, [many] * 3]}))
    create = read(pack(ASK | {"metadata": {"a": "b"}, "input": "y" * 100_000, "stream_id": "s"}))
    assert isinstance(create, Create)
    assert create.metadata == {"a": "b"}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_what_is_cut_off_is_for_the_decoder_to_say(cut):
    with pytest.raises(InvalidRequest):
        read(pack(ASK)[:-cut])
