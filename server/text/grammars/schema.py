"""JSON schemas: unsupported keywords, and the layout of the JSON.

llguidance compiles a schema or reports why not; this module only checks what it would silently ignore.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher

from foresay.server.schemas.bounds import check_bytes
from foresay.spec.errors import InvalidRequest, Path, inside, path_of

Schema = dict[str, Any]

MOST_BYTES = 64 * 1024
MOST_PROPERTIES = 500  # of one object; llguidance supports some 550 optional ones
MOST_DEPTH = 100
MOST_PATTERN = 2000

#: One line, as ``json.dumps`` writes it: most of the layout is then forced, and no model can get lost in white space.
ONE_LINE: Schema = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
COMPACT: Schema = {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False}
FLEXIBLE: Schema = {"whitespace_flexible": True}
#: Enough for any sensible layout, but not for pages of white space.
BOUNDED: Schema = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}

ANY_OBJECT: Schema = {"type": "object"}

#: Keywords of other dialects that change what is valid but that llguidance ignores, with their harmless values.
_OTHER_DIALECTS: dict[str, tuple[object, ...]] = {
    "disallow": (),
    "extends": (),
    "divisibleBy": (),
    "nullable": (False,),
    "x-guidance": (),
}
_HARMLESS: dict[str, object] = {"uniqueItems": False, "nullable": False}
_ONE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SEVERAL = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
#: For multipleOf, llguidance builds as many states as the divisor has steps, for several divisors of one number as
#: their least common multiple; 10,000 steps take a second to compile, ten times as many a minute and more than a
#: gigabyte.
MOST_STEPS = 10_000
_MULTIPLE = re.compile(r'multipleOf\\*"\s*:\s*-?(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)')
_WRITTEN = re.compile(r"\\+u00([0-7][0-9a-fA-F])")
_CONTROL = re.compile(rb"\\u00[01]|\x7f")


def schema_grammar(schema: object, param: str | Path, layout: Schema = ONE_LINE, closed: bool = False) -> str:
    """A grammar of JSON valid under ``schema``, written in ``layout``. closed: see :func:`guided`."""
    return LLMatcher.grammar_from_json_schema(_text(guided(schema, param, layout, closed)))


def guided(schema: object, param: str | Path, layout: Schema = ONE_LINE, closed: bool = False) -> Schema:
    """``schema`` in llguidance's form, including the layout of the JSON.

    closed: objects with properties have no others, unless the schema says so. Raises :class:`InvalidRequest` for what
    cannot be enforced.
    """
    with inside(*path_of(param)):
        if not isinstance(schema, dict):
            raise InvalidRequest((), " must be a JSON schema that is an object")
        check_bytes(schema, MOST_BYTES, ())
        try:
            schema = _rewritten(schema, closed, MOST_DEPTH)
        except RecursionError:
            raise InvalidRequest((), " is nested too deeply") from None
        options = layout | _escapes(schema) | {"lenient": False, "coerce_one_of": False}
    return schema | {"x-guidance": options}


def check_multiples(grammar: str, param: str) -> None:
    """Raise if multipleOf in a grammar's schemas needs too many steps."""
    plain, total, common = _WRITTEN.sub(lambda found: chr(int(found[1], 16)), grammar), 0, 1
    for number in _MULTIPLE.finditer(plain):
        steps = _steps(number[1])
        total, common = total + steps, math.lcm(common, steps)
        if max(total, common) > MOST_STEPS:
            wrong = "numbers of multipleOf are too large or too many: their sum and their least common multiple"
            raise InvalidRequest(param, f": the {wrong} must be at most {MOST_STEPS:,}")


def _steps(number: str) -> int:
    """The digits of a decimal number without its point, and without leading and trailing zeros, which cost nothing."""
    digits = number.lower().partition("e")[0].replace(".", "").strip("0")
    return int(digits or "0") if len(digits) <= len(str(MOST_STEPS)) else MOST_STEPS + 1


def _text(schema: Schema) -> str:
    return msgspec.json.encode(schema).decode()


def _rewritten(schema: Schema, closed: bool, depth: int) -> Schema:
    """A copy without harmless keywords; raises for keywords that would be ignored."""
    if depth == 0:
        raise InvalidRequest((), " is nested too deeply")
    _refuse(schema)
    rewritten: Schema = {}
    for keyword, value in schema.items():
        if keyword in _HARMLESS and value is False:
            continue
        rewritten[keyword] = _rewritten_value(keyword, value, closed, depth - 1)
    if closed and "properties" in schema and "additionalProperties" not in schema:
        rewritten["additionalProperties"] = False
    return rewritten


def _rewritten_value(keyword: str, value: Any, closed: bool, depth: int) -> Any:
    if isinstance(value, dict) and keyword in _NAMED:
        return {name: _below(part, closed, depth) for name, part in value.items()}
    if isinstance(value, list) and keyword in _SEVERAL:
        return [_below(part, closed, depth) for part in value]
    return _below(value, closed, depth) if keyword in _ONE else value


def _below(part: Any, closed: bool, depth: int) -> Any:
    return _rewritten(part, closed, depth) if isinstance(part, dict) else part


def _refuse(schema: Schema) -> None:
    for keyword, harmless in _OTHER_DIALECTS.items():
        if keyword in schema and not any(schema[keyword] is good for good in harmless):
            raise InvalidRequest((), f": the keyword {keyword} is not supported")
    properties = schema.get("properties")
    if isinstance(properties, dict) and len(properties) > MOST_PROPERTIES:
        many = f"an object has {len(properties)} properties; at most {MOST_PROPERTIES} are allowed"
        raise InvalidRequest((), f": {many}")
    patterns = [schema.get("pattern"), *(schema["patternProperties"] if _has_names(schema) else ())]
    if any(isinstance(pattern, str) and len(pattern) > MOST_PATTERN for pattern in patterns):
        raise InvalidRequest((), f": a pattern has more than {MOST_PATTERN} characters")
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        # Unlisted keys may be repeated, so counting them proves nothing.
        raise InvalidRequest((), ": minProperties beyond the required properties is not supported")


def _has_names(schema: Schema) -> bool:
    return isinstance(schema.get("patternProperties"), dict)


def _escapes(schema: Schema) -> Schema:
    r"""How strings may be escaped: not as ``\u0061`` if that could be another spelling of a property's name.

    llguidance compares names as written, so an open object with ``"a"`` could also have ``"\u0061"`` of any type.
    """
    if not any(_is_open(part) for part in _parts(schema)):
        return {}
    if _CONTROL.search(_text(schema).encode()):
        wrong = " holds control characters, which takes additionalProperties: false in every object"
        raise InvalidRequest((), wrong)
    return {"json_allowed_escapes": 'nrbtf\\"'}


def _is_open(schema: Schema) -> bool:
    """Whether an object has rules for some names but allows others."""
    ruled = any(schema.get(keyword) for keyword in ("properties", "patternProperties", "required"))
    return ruled and schema.get("additionalProperties") is not False


def _parts(schema: Any) -> Iterator[Schema]:
    """Every object within a schema that could be a schema."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
