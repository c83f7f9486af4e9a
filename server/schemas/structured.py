"""Structured output on the wire: OpenAI's ``response_format`` and vLLM's ``structured_outputs``."""

from __future__ import annotations

from typing import Any

import msgspec


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name. strict: the schema holds either way."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What the answer must be. type: ``text``, ``json_object`` or ``json_schema``."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """What the answer must match: exactly one of json (a schema, or its text), regex, choice, grammar, json_object.

    The other fields say how JSON is written.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    structural_tag: Any = None
