"""Random JSON schemas, the same ones for the same seed: nested objects, arrays, enums, bounds, patterns, references.

Strings and arrays are bounded, so that a toy model at temperature 1 comes to an end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

NAMES = ("id", "name", "age", "tags", "size", "color", "note", "items", "score", "owner", "street name", "ünit", "a_b")
WORDS = ("red", "green", "blue", "one", "two words", 'with "quotes"', "naïve", "x", "yes", "back\\slash")
PATTERNS = (
    r"^[a-z]{1,6}$",
    r"^\d{3}-\d{4}$",
    r"^[A-Z][a-z]{0,4}( [A-Z][a-z]{0,4})?$",
    r"^(yes|no|maybe)$",
    r"[0-9]{2}",
)


class Schemas:
    """Makes schemas of at most ``depth`` levels, except for recursive references. room: of longest strings."""

    def __init__(self, seed: int, depth: int = 3, room: int = 40) -> None:
        self._random = random.Random(seed)
        self._depth, self._room = depth, room
        self._definitions: dict[str, Schema] = {}

    def next(self) -> Schema:
        """Another schema, an object or an array at its top."""
        self._definitions = {}
        top = self._object if self._random.random() < 0.8 else self._array
        schema = top(self._depth)
        return schema | {"$defs": self._definitions} if self._definitions else schema

    def _any(self, depth: int) -> Schema:
        flat = (self._string, self._string, self._integer, self._number, self._enum, self._const, self._plain)
        deep = (self._object, self._object, self._array, self._any_of, self._reference, self._chain)
        make: Callable[[int], Schema] = self._random.choice((*flat, *deep) if depth > 0 else flat)
        return make(depth - 1)

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(1, 3))
        required = [name for name in names if self._random.random() < 0.7]
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if required or self._random.random() < 0.5:
            schema["required"] = required
        if self._random.random() < 0.9:
            schema["additionalProperties"] = False
        elif self._random.random() < 0.5:
            schema["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 1)
        schema = {"type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + 2}
        if self._random.random() < 0.2:
            schema["prefixItems"] = [self._any(0)]
        return schema

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(2, 3))]}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] |= self._any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _chain(self, depth: int) -> Schema:
        """A list that continues as long as the model likes."""
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {
            "type": "object",
            "properties": {"value": self._any(0), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def _string(self, depth: int) -> Schema:
        kind = self._random.random()
        if kind < 0.3:
            return {"type": "string", "pattern": self._random.choice(PATTERNS), "maxLength": 16}
        if kind < 0.4:
            return {"type": "string", "format": self._random.choice(("date", "time", "ipv4", "uuid"))}
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, self._room)}

    def _integer(self, depth: int) -> Schema:
        schema: Schema = {"type": "integer"}
        low = self._random.randint(-500, 500)
        if self._random.random() < 0.95:
            schema["minimum"] = low
            schema["maximum"] = low + self._random.randint(0, 5000)
        if self._random.random() < 0.2:
            schema["multipleOf"] = self._random.choice((2, 5, 7))
            schema["maximum"] = low + 5000
        return schema

    def _number(self, depth: int) -> Schema:
        low = round(self._random.uniform(-50, 50), 2)
        if self._random.random() < 0.7:  # otherwise there may be endless digits
            return {"type": "number", "multipleOf": 0.25, "minimum": int(low), "maximum": int(low) + 20}
        return {"type": "number", "exclusiveMinimum": low, "maximum": round(low + self._random.uniform(1, 100), 2)}

    def _enum(self, depth: int) -> Schema:
        values = [*self._random.sample(WORDS, 3), self._random.randint(0, 99), None, True, {"k": [1, "v"]}]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _const(self, depth: int) -> Schema:
        return {"const": self._random.choice((*WORDS, 7, None, False))}

    def _plain(self, depth: int) -> Schema:
        return {"type": self._random.choice(("boolean", "null", ["boolean", "null"]))}


def schemas(count: int, seed: int = 0, depth: int = 3, room: int = 40) -> list[Schema]:
    """``count`` schemas."""
    source = Schemas(seed, depth, room)
    return [source.next() for _ in range(count)]
