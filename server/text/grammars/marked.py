"""From a function's JSON schema to rules for arguments in Gemma 4's notation: ``{city:<|"|>Paris<|"|>,days:3}``.

Only numbers are as in JSON, so all else becomes rules here. Nothing is escaped in a string, whose constraints (beside a
list of values, and its length) cannot be enforced and are refused. Keys are in the order in which templates show them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from foresay.server.text.grammars.fields import guided
from foresay.spec.errors import InvalidRequest, Path

#: Keywords that restrict nothing.
REMARKS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "format"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OF_TYPE = {
    "string": {"minLength", "maxLength"},
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "boolean": set[str](),
    "null": set[str](),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "$defs", "definitions"},
}
_BARE = re.compile(r'[^\s:=,{}\[\]()<>"]+')
#: Keys that no schema lists.
_KEY = "[A-Za-z_][A-Za-z0-9_.-]*"
_ANY = f"""any: string | any_object | any_array | number | "true" | "false" | "null"
any_object: "{{" (any_pair ("," any_pair)*)? "}}"
any_array: "[" (any ("," any)*)? "]"
any_pair: KEY ":" any
KEY: /{_KEY}/
number: %json {{"type": "number"}}"""


def literal(text: str) -> str:
    """A rule for exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def refuse(schema: Any, known: set[str], path: Path) -> None:
    """Raise for a keyword that is not known."""
    for keyword in schema if isinstance(schema, dict) else ():
        if keyword not in known | REMARKS:
            raise InvalidRequest(path, f": {keyword} cannot be held to in the way this model writes calls")


_Some = Annotated[list[Any], msgspec.Meta(min_length=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Keywords(msgspec.Struct):
    """The types of the keywords that count here."""

    type: str | list[str] = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []
    enum: _Some = []
    anyOf: _Some = []  # noqa: N815
    oneOf: _Some = []  # noqa: N815
    allOf: _Some = []  # noqa: N815
    minItems: _Count = 0  # noqa: N815
    maxItems: _Count = 0  # noqa: N815
    minLength: _Count = 0  # noqa: N815
    maxLength: _Count = 0  # noqa: N815


class Quote(msgspec.Struct, frozen=True):
    """What is around strings. text: as it is spelled; rule: as a grammar has it, a token or its spelling."""

    text: str
    rule: str

    @property
    def token(self) -> bool:
        """Whether it is a token, which no text contains."""
        return self.rule != literal(self.text)

    @property
    def rules(self) -> Iterator[str]:
        """The rules of any string, and of any value."""
        if self.token:
            yield f"string: {self.rule} TEXT? {self.rule}"
            yield "TEXT: /(.|\\n)+/"
        else:
            yield f"string: {self.rule} text"
            yield f"text[lazy]: /(.|\\n)*{re.escape(self.text)}/"
        yield from _ANY.split("\n")

    def around(self, rule: str) -> str:
        """The string with this text."""
        return f"{self.rule} {rule} {self.rule}"


def argument_rules(name: str, schema: dict[str, Any], path: Path, quote: Quote) -> Iterator[str]:
    """A rule ``name`` for arguments that match ``schema``, and the rules it needs. path: to the schema."""
    schema = guided(schema, path)  # refuses what is not a schema, and what is nested too deeply
    del schema["x-guidance"]
    if schema.get("type", "object") != "object":
        raise InvalidRequest(path, f".type must be object, got {schema['type']!r}")
    rules = _Rules(name, schema, quote)
    try:
        whole = rules.value(schema | {"type": "object"}, path)
    except RecursionError:  # llguidance recurses as well, on a larger stack
        raise InvalidRequest(path, " is nested too deeply, with what its references point to") from None
    yield f"{name}: {whole}"
    yield from (f"{rule}: {text}" for rule, text in rules.made.items())
    yield from quote.rules


class _Rules:
    """The rules of one schema. made: by name."""

    def __init__(self, name: str, root: dict[str, Any], quote: Quote) -> None:
        self.made: dict[str, str] = {}
        self._name, self._root, self._quote = name, root, quote
        self._targets: dict[str, str] = {}

    def value(self, schema: Any, path: Path) -> str:
        """The name of the rule for values of a schema."""
        if schema is True or schema == {} or (isinstance(schema, dict) and not schema.keys() - REMARKS):
            return "any"
        try:
            msgspec.convert(schema, _Keywords)
        except msgspec.ValidationError as error:
            raise InvalidRequest(path, f" must be a JSON schema that a call can be held to: {error}") from None
        for what in ("Items", "Length"):
            if schema.get(f"min{what}", 0) > schema.get(f"max{what}", math.inf):
                raise InvalidRequest(path, f".min{what} must be at most max{what}")
        if "$ref" in schema:
            refuse(schema, {"$ref"}, path)
            pointer = str(schema["$ref"])
            if pointer not in self._targets:
                self._targets[pointer] = self._rule("")  # known before it is made: it may refer to itself
                self.made[self._targets[pointer]] = self.value(_found(self._root, pointer, path), path)
            return self._targets[pointer]
        return self._rule(" | ".join(self._alternatives(schema, path)))

    def _rule(self, text: str) -> str:
        name = f"{self._name}_{len(self.made)}"
        self.made[name] = text
        return name

    def _alternatives(self, schema: dict[str, Any], path: Path) -> Iterator[str]:
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                if schema.keys() - REMARKS - {several} or (len(schema[several]) != 1 and several == "allOf"):
                    refuse({several: ()}, set(), path)
                yield from (self.value(one, (*path, several, index)) for index, one in enumerate(schema[several]))
                return
        if "const" in schema or "enum" in schema:
            refuse(schema, {"type", "enum" if "enum" in schema else "const"}, path)
            yield from self._listed(schema["enum"] if "enum" in schema else [schema["const"]], path)
            return
        given = schema.keys() - REMARKS
        named = (
            schema["type"] if "type" in schema else next((one for one in _OF_TYPE if given <= _OF_TYPE[one]), "object")
        )
        kinds = named if isinstance(named, list) else [named]
        if not kinds or any(kind not in _OF_TYPE for kind in kinds):
            raise InvalidRequest(path, f".type must be one of {', '.join(_OF_TYPE)}, or a list of them, got {named!r}")
        refuse(schema, {"type"}.union(*(_OF_TYPE[kind] for kind in kinds)), path)
        for kind in kinds:
            yield self._of_type(kind, schema, path)

    def _of_type(self, kind: str, schema: dict[str, Any], path: Path) -> str:
        match kind:
            case "string":
                return self._string(schema, path)
            case "array":
                return self._array(schema, path)
            case "object":
                return self._object(schema, path)
            case "boolean":
                return '"true" | "false"'
            case "null":
                return '"null"'
        bounds = {keyword: schema[keyword] for keyword in sorted(_NUMBERS & schema.keys())}
        return f"%json {json.dumps(guided({'type': kind} | bounds, path))}"

    def _string(self, schema: dict[str, Any], path: Path) -> str:
        if not schema.keys() & _OF_TYPE["string"]:
            return "string"
        if not self._quote.token:
            refuse(schema, {"type"}, path)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return self._quote.around(f"/(.|\\n){{{least},{most}}}/")

    def _array(self, schema: dict[str, Any], path: Path) -> str:
        item = self.value(schema.get("items", True), (*path, "items"))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, schema: dict[str, Any], path: Path) -> str:
        """Its members in order, each behind a comma unless it is the first one."""
        needed = schema.get("required", [])
        properties = dict.fromkeys(needed, True) | schema.get("properties", {})
        extra = self._extra(properties, schema.get("additionalProperties", not schema.get("properties")), path)
        firsts, rest = (['""'], "") if not extra else (['""', f'{extra} ("," {extra})*'], f'("," {extra})*')
        for key in sorted(properties, key=str.lower, reverse=True):
            optional = "" if key in needed else "?"
            one = self.value(properties[key], (*path, "properties", key))
            name = literal(key) if _BARE.fullmatch(key) else self._quote.around(self._spelled(key, path))
            member = self._rule(f'{name} ":" {one}')
            firsts = [f"{member} {rest}", *(firsts if optional else ())]
            rest = self._rule(f'("," {member}){optional} {rest}')
        return f'"{{" ({" | ".join(firsts)}) "}}"'

    def _extra(self, properties: dict[str, Any], others: Any, path: Path) -> str:
        """The rule for a member that is not listed; "" if there must be none. others: its schema."""
        if others is False:
            return ""
        key = "KEY"
        if listed := "|".join(re.escape(one) for one in properties if re.fullmatch(_KEY, one)):
            key = f"{self._name}_KEY_{len(self.made)}".upper()
            self.made[key] = f"KEY & ~/({listed})/"
        return self._rule(f'{key} ":" {self.value(others, (*path, "additionalProperties"))}')

    def _listed(self, values: list[Any], path: Path) -> Iterator[str]:
        """The rules for exactly these values."""
        if any(isinstance(one, Mapping | list) for one in values):
            raise InvalidRequest(path, ": enum and const must not hold objects or lists for this model")
        texts = [self._spelled(one, path) for one in values if isinstance(one, str)]
        if words := [text for text in texts if text]:
            yield self._quote.around(self._words(words))
        if "" in texts:
            yield self._quote.around("")
        if others := [literal(json.dumps(one)) for one in values if not isinstance(one, str)]:
            yield self._words(others)

    def _words(self, words: list[str]) -> str:
        """The name of a terminal: a rule could have only some 2000 alternatives."""
        name = f"{self._name}_WORDS_{len(self.made)}".upper()
        self.made[name] = " | ".join(words)
        return name

    def _spelled(self, text: str, path: Path) -> str:
        """The rule for exactly this text, which may stand in a string; "" if it is empty."""
        if self._quote.text in text:
            raise InvalidRequest(path, f": this model cannot write {self._quote.text} in a string")
        return literal(text) if text else ""


def _found(root: dict[str, Any], pointer: str, path: Path) -> Any:
    """What a reference within the schema points to."""
    found: Any = root
    steps = pointer.removeprefix("#").removeprefix("/").split("/") if pointer != "#" else []
    for step in steps if pointer.startswith("#") else [""]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or step not in found:
            raise InvalidRequest(path, f".$ref: there is no {pointer}")
        found = found[step]
    return found
