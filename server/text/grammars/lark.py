"""Grammars, regular expressions and choices as llguidance takes them."""

from __future__ import annotations

import re

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from spec.errors import InvalidRequest

MOST_CHOICES = 2000
#: Options of a Lark rule that ask for what masks cannot do: other sampling, counting tokens, taking text back.
_RULE_OPTIONS = re.compile(r"^[ \t]*[!?]?[\w.-]+\[[^\n]*?\b(temperature|max_tokens|stop)\s*=", re.MULTILINE)
_PLAIN = re.compile(r"[A-Za-z0-9]|[^\x00-\x7f]")


def regex_grammar(pattern: str, param: str) -> str:
    """The whole text matches ``pattern``."""
    if not pattern:
        raise InvalidRequest(param, f"{param} must not be empty")
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: list[str], param: str) -> str:
    """The text is one of ``choices``."""
    if not choices or "" in choices:
        raise InvalidRequest(param, f"{param} must hold at least one text, and none that is empty")
    if len(choices) > MOST_CHOICES:
        raise InvalidRequest(param, f"{param} holds {len(choices)} texts; at most {MOST_CHOICES} are allowed")
    return LLMatcher.grammar_from_regex("|".join(_literal(choice) for choice in choices))


def _literal(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(char if _PLAIN.match(char) else f"\\x{{{ord(char):x}}}" for char in text)


def lark_grammar(text: str, param: str) -> str:
    """The text matches a grammar: Lark as llguidance reads it, or GBNF (``root ::= ...``), which is translated."""
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise InvalidRequest(param, f"{param} is nested too deeply") from None
    except Exception as error:  # whatever its parser trips over
        raise InvalidRequest(param, f"{param} is neither Lark (a rule named start) nor GBNF: {error}") from None
    option = _RULE_OPTIONS.search(lark)
    if option is not None:
        raise InvalidRequest(param, f"{param}: the rule option {option[1]} is not supported by this server")
    return LLMatcher.grammar_from_lark(lark)
