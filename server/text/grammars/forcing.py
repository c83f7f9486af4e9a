"""Grammars whose text spells a special token, such as the string ``"<think>"``.

Where a grammar leaves one text, llguidance forces the tokens that the tokenizer makes of it; but a tokenizer reads the
name of a special token as that token, which is no text. Such a grammar is therefore compiled without forcing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_ESCAPE = re.compile(r"\\+x\{([0-9a-f]{1,6})\}")
_OFF = '%llguidance {"no_forcing": true}\n'


def spells(grammar: str, names: Iterable[str]) -> bool:
    """Whether the text of ``grammar`` holds one of ``names``."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), grammar)
    return any(name in plain for name in names)


def unforced(grammar: str) -> str:
    """The same grammar, leaving the tokens to the model."""
    if not grammar.startswith("{"):
        return _OFF + grammar
    whole = json.loads(grammar)
    first = whole["grammars"][0]
    lark, schema = first.get("lark_grammar"), first.get("json_schema")
    first["lark_grammar"] = _OFF + (f"start: %json {json.dumps(schema)}" if lark is None else lark)
    first["json_schema"] = None
    return json.dumps(whole)
