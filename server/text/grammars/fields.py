"""From ``response_format`` and ``structured_outputs`` to the grammar the answer must match: JSON schemas first.

llguidance compiles a schema or reports why not; only what it would silently ignore is checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from foresay.server.schemas.bounds import check_bytes
from foresay.server.schemas.shared import GenerationRequest, ResponseFormat, StructuredOutputs
from foresay.spec.errors import InvalidRequest, Path, inside, path_of
from foresay.spec.request import Grammar
from foresay.spec.sampling import SamplingParams

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
    named = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(named if isinstance(named, dict) else ())]
    if any(isinstance(pattern, str) and len(pattern) > MOST_PATTERN for pattern in patterns):
        raise InvalidRequest((), f": a pattern has more than {MOST_PATTERN} characters")
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        # Unlisted keys may be repeated, so counting them proves nothing.
        raise InvalidRequest((), ": minProperties beyond the required properties is not supported")


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


#: Some regular expressions take quadratic time to compile: half a second for 8 kB.
MOST_REGEX_BYTES = 4 * 1024
MOST_LARK_BYTES = 16 * 1024

_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The grammar that a request needs; None if any text is allowed.

    Raises :class:`InvalidRequest` naming the field. The engine finds out whether the grammar compiles.
    """
    given = (
        None if request.response_format is None else of_format(request.response_format),
        None if request.structured_outputs is None else of_outputs(request.structured_outputs),
        None if request.json_schema is None else json_grammar(request.json_schema, "json_schema"),
        own_grammar(request.grammar, "grammar") if request.grammar else None,
    )
    found = [one for one in given if one is not None]
    if not found:
        return None
    first, *others = (one.param.partition(".")[0] for one in found)
    if others:
        raise InvalidRequest(others[0], f" and {first} cannot be combined")
    refuse_lengths(request, found[0].param)
    return found[0]


def refuse_lengths(request: GenerationRequest | SamplingParams, param: str) -> None:
    """Raise if the request sets a length that a grammar could contradict."""
    for field, given in (("min_tokens", bool(request.min_tokens)), ("ignore_eos", bool(request.ignore_eos))):
        if given:
            raise InvalidRequest(field, f" and {param} cannot be combined: a grammar says where the text ends")


def of_format(given: ResponseFormat) -> Grammar | None:
    """The grammar of ``response_format``; None if any text is allowed."""
    match given.type:
        case "text":
            return None
        case "json_object" if given.schema is not None:
            return json_grammar(given.schema, "response_format.schema")
        case "json_object":
            return _grammar(schema_grammar(ANY_OBJECT, "response_format", BOUNDED), "response_format")
        case "json_schema":
            field = "response_format.json_schema"
            if given.json_schema is None:
                raise InvalidRequest(field, " is required")
            return json_grammar(given.json_schema.schema, f"{field}.schema")
    known = "text, json_object or json_schema"
    raise InvalidRequest("response_format.type", f" must be {known}, got {given.type!r}")


def of_outputs(given: StructuredOutputs) -> Grammar | None:
    """The grammar of ``structured_outputs``; None if any text is allowed."""
    if given.structural_tag is not None:
        field = "structured_outputs.structural_tag"
        raise InvalidRequest(field, " is not supported by this server; a Lark grammar can express the same")
    kinds = [kind for kind in _KINDS if getattr(given, kind) is not None and getattr(given, kind) is not False]
    if len(kinds) > 1:
        raise InvalidRequest("structured_outputs", f" must hold one of {', '.join(kinds)}, not all")
    if not kinds:
        if given.json_object is False:
            return None
        raise InvalidRequest("structured_outputs", f" must hold one of {', '.join(_KINDS)}")
    return _of_kind(given, kinds[0])


def _of_kind(given: StructuredOutputs, kind: str) -> Grammar:
    param = f"structured_outputs.{kind}"
    closed = bool(given.disable_additional_properties)
    if kind == "json":
        return json_grammar(given.json, param, _layout(given, ONE_LINE), closed)
    if kind == "json_object" and not closed:
        return _grammar(schema_grammar(ANY_OBJECT, param, _layout(given, BOUNDED)), param)
    for option in _JSON_OPTIONS:
        if getattr(given, option):
            field = f"structured_outputs.{option}"
            raise InvalidRequest(field, f" goes with structured_outputs.json, not with {kind}")
    if given.regex is not None:
        return _grammar(regex_grammar(_bounded(given.regex, param, MOST_REGEX_BYTES), param), param)
    if given.choice is not None:
        check_bytes(given.choice, MOST_BYTES, param)
        return _grammar(choice_grammar(given.choice, param), param)
    assert given.grammar is not None, "one kind is given"
    return own_grammar(given.grammar, param)


def own_grammar(text: str, param: str) -> Grammar:
    """The user's own grammar."""
    return _grammar(lark_grammar(_bounded(text, param, MOST_LARK_BYTES), param), param)


def json_grammar(schema: object, param: str, layout: Schema = ONE_LINE, closed: bool = False) -> Grammar:
    """JSON valid under ``schema``: an object, or its text."""
    if schema is None:
        raise InvalidRequest(param, " is required")
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(_bounded(schema, param))
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(param, f" is not valid JSON: {error}") from None
    return _grammar(schema_grammar(schema, param, layout, closed), param)


def _layout(given: StructuredOutputs, usual: Schema) -> Schema:
    """The layout of JSON."""
    if given.whitespace_pattern is not None:
        if given.disable_any_whitespace is not None:
            field = "structured_outputs.whitespace_pattern"
            raise InvalidRequest(field, " and disable_any_whitespace cannot be combined")
        return {"whitespace_pattern": given.whitespace_pattern}
    if given.disable_any_whitespace is None:
        return usual
    return COMPACT if given.disable_any_whitespace else FLEXIBLE


def _bounded(text: str, param: str, most: int = MOST_BYTES) -> str:
    size = len(text.encode(errors="surrogatepass"))
    if size > most:
        raise InvalidRequest(param, f" has {size} bytes; at most {most} are allowed")
    return text


def _grammar(text: str, param: str) -> Grammar:
    return bounded(Grammar(text=text, param=param))


def bounded(grammar: Grammar, most: int = MOST_BYTES) -> Grammar:
    """``grammar``, checked for length: grammars are sent as text, whose size bounds the cost of compiling."""
    _bounded(grammar.text, grammar.param, most)
    check_multiples(grammar.text, grammar.param)
    return grammar


# -- in llguidance's format ------------------------------------------------------------------------------------------


MOST_CHOICES = 2000
#: Options of a Lark rule that masks cannot implement: other sampling, counting tokens, removing text.
_RULE_OPTIONS = re.compile(r"^[ \t]*[!?]?[\w.-]+\[[^\n]*?\b(temperature|max_tokens|stop)\s*=", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9]|[^\x00-\x7f]")


def regex_grammar(pattern: str, param: str) -> str:
    """A grammar that matches ``pattern`` as a whole."""
    if not pattern:
        raise InvalidRequest(param, " must not be empty")
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: list[str], param: str) -> str:
    """A grammar that matches one of ``choices``."""
    if not choices or "" in choices:
        raise InvalidRequest(param, " must hold at least one text, and none that is empty")
    if len(choices) > MOST_CHOICES:
        raise InvalidRequest(param, f" holds {len(choices)} texts; at most {MOST_CHOICES} are allowed")
    return LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in choices))


def _literal(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(char if _PLAIN.match(char) else f"\\x{{{ord(char):x}}}" for char in text)


def lark_grammar(text: str, param: str) -> str:
    """The user's own grammar: Lark in llguidance's dialect, or GBNF (``root ::= ...``), which is translated."""
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise InvalidRequest(param, " is nested too deeply") from None
    except Exception as error:  # any error of its parser
        raise InvalidRequest(param, f" is neither Lark (a rule named start) nor GBNF: {error}") from None
    option = _RULE_OPTIONS.search(lark)
    if option is not None:
        raise InvalidRequest(param, f": the rule option {option[1]} is not supported by this server")
    return LLMatcher.grammar_from_lark(lark)
