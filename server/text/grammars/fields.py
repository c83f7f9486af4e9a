"""From ``response_format`` and ``structured_outputs`` to the grammar the answer must match."""

from __future__ import annotations

import asyncio
import re

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from foresay.server.schemas.bounds import check_bytes
from foresay.server.schemas.shared import GenerationRequest, ResponseFormat, StructuredOutputs
from foresay.server.text.grammars import schema as schemas
from foresay.spec.errors import InvalidRequest
from foresay.spec.request import Grammar
from foresay.spec.sampling import SamplingParams

#: Some regular expressions take quadratic time to compile: half a second for 8 kB.
MOST_REGEX_BYTES = 4 * 1024
MOST_LARK_BYTES = 16 * 1024

_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


async def wanted(request: GenerationRequest) -> Grammar | None:
    """The grammar that a request needs, made in a thread.

    Raises :class:`InvalidRequest` naming the field. The engine finds out whether the grammar compiles.
    """
    if request.response_format is None and request.structured_outputs is None:
        return None
    return await asyncio.to_thread(grammar_of, request)


def grammar_of(request: GenerationRequest) -> Grammar | None:
    """The grammar that a request needs; None if any text is allowed."""
    first = of_format(request.response_format) if request.response_format is not None else None
    second = of_outputs(request.structured_outputs) if request.structured_outputs is not None else None
    if first is not None and second is not None:
        raise InvalidRequest("structured_outputs", " and response_format cannot be combined")
    grammar = first or second
    if grammar is not None:
        refuse_lengths(request, grammar.param)
    return grammar


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
            return _grammar(
                schemas.schema_grammar(schemas.ANY_OBJECT, "response_format", schemas.BOUNDED), "response_format"
            )
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
        return json_grammar(given.json, param, _layout(given, schemas.ONE_LINE), closed)
    if kind == "json_object" and not closed:
        return _grammar(schemas.schema_grammar(schemas.ANY_OBJECT, param, _layout(given, schemas.BOUNDED)), param)
    for option in _JSON_OPTIONS:
        if getattr(given, option):
            field = f"structured_outputs.{option}"
            raise InvalidRequest(field, f" goes with structured_outputs.json, not with {kind}")
    if given.regex is not None:
        return _grammar(regex_grammar(_bounded(given.regex, param, MOST_REGEX_BYTES), param), param)
    if given.choice is not None:
        check_bytes(given.choice, schemas.MOST_BYTES, param)
        return _grammar(choice_grammar(given.choice, param), param)
    assert given.grammar is not None, "one kind is given"
    return _grammar(lark_grammar(_bounded(given.grammar, param, MOST_LARK_BYTES), param), param)


def json_grammar(
    schema: object, param: str, layout: schemas.Schema = schemas.ONE_LINE, closed: bool = False
) -> Grammar:
    """JSON valid under ``schema``: an object, or its text."""
    if schema is None:
        raise InvalidRequest(param, " is required")
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(_bounded(schema, param))
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(param, f" is not valid JSON: {error}") from None
    return _grammar(schemas.schema_grammar(schema, param, layout, closed), param)


def _layout(given: StructuredOutputs, usual: schemas.Schema) -> schemas.Schema:
    """The layout of JSON."""
    if given.whitespace_pattern is not None:
        if given.disable_any_whitespace is not None:
            field = "structured_outputs.whitespace_pattern"
            raise InvalidRequest(field, " and disable_any_whitespace cannot be combined")
        return {"whitespace_pattern": given.whitespace_pattern}
    if given.disable_any_whitespace is None:
        return usual
    return schemas.COMPACT if given.disable_any_whitespace else schemas.FLEXIBLE


def _bounded(text: str, param: str, most: int = schemas.MOST_BYTES) -> str:
    size = len(text.encode(errors="surrogatepass"))
    if size > most:
        raise InvalidRequest(param, f" has {size} bytes; at most {most} are allowed")
    return text


def _grammar(text: str, param: str) -> Grammar:
    return bounded(Grammar(text=text, param=param))


def bounded(grammar: Grammar, most: int = schemas.MOST_BYTES) -> Grammar:
    """``grammar``, checked for length: grammars are sent as text, whose size bounds the cost of compiling."""
    _bounded(grammar.text, grammar.param, most)
    schemas.check_multiples(grammar.text, grammar.param)
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
