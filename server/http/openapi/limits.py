"""Ranges that the server enforces and fields that it refuses, for the OpenAPI document; tests send what is outside.

They are enforced where fields are understood (:mod:`server.api.common.validation`, :mod:`server.text.options`,
:mod:`spec.sampling`), in words that say more than a schema could.
"""

from __future__ import annotations

from typing import Any

from server.api.anthropic.request import HOTTEST
from server.api.common.prediction import CONTENT, TEXT
from server.api.common.validation import MOST_STOP_IDS, MOST_STOPS
from server.api.ollama.request import FIELDS_REFUSED, OPTIONS_REFUSED
from server.api.responses.schemas import RESPONSES_NOT_SUPPORTED
from server.gateway.caller import ID
from server.schemas.bounds import MOST_NAME
from server.schemas.shared import NOT_SUPPORTED
from server.text.conversation import ROLES
from server.text.grammars.fields import OLD_NAMES
from server.text.options import MOST_BAD_WORDS, MOST_CHOICES
from spec.sampling import MOST_LOGPROBS

Schema = dict[str, Any]


def _between(least: float, most: float) -> Schema:
    return {"minimum": least, "maximum": most}


#: By field, in whichever request it stands. What is said of arrays, texts and numbers holds for the values that are.
LIMITS: dict[str, Schema] = {
    "temperature": _between(0, 2),
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": _between(0, 1),
    "presence_penalty": _between(-2, 2),
    "frequency_penalty": _between(-2, 2),
    "repetition_penalty": _between(0.01, 100),
    "n": _between(1, MOST_CHOICES),
    "logprobs": _between(0, MOST_LOGPROBS),
    "top_logprobs": _between(0, MOST_LOGPROBS),
    "prompt_logprobs": _between(0, MOST_LOGPROBS),
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "stream_interval": {"minimum": 1},
    "stop": {"minLength": 1, "maxLength": MOST_NAME, "maxItems": MOST_STOPS},
    "stop_token_ids": {"maxItems": MOST_STOP_IDS},
    "bad_words": {"maxItems": MOST_BAD_WORDS},
    "cache_salt": {"maxLength": MOST_NAME},
    "user": {"maxLength": MOST_NAME},
    "request_id": {"pattern": f"^{ID.pattern}$"},
    "stop_sequences": {"maxItems": MOST_STOPS},
    "messages": {"minItems": 1},
    "prompt": {"minLength": 1, "minItems": 1},
    "format": {"enum": ["", "json"]},
    "think": {"enum": ["low", "medium", "high"]},
}

#: By struct and field, where a struct has its own idea.
OWN_LIMITS: dict[tuple[str, str], Schema] = {
    ("CompletionRequest", "max_tokens"): {"minimum": 0},
    ("CompletionRequest", "top_logprobs"): {},
    ("ChatRequest", "logprobs"): {},
    ("MessagesRequest", "temperature"): _between(0, HOTTEST),
    ("OllamaOptions", "repeat_penalty"): _between(0.01, 100),
    ("Message", "role"): {"enum": sorted(ROLES)},
    ("Prediction", "type"): {"enum": [CONTENT]},
    ("PredictionPart", "type"): {"enum": [TEXT]},
    ("OllamaChatRequest", "messages"): {},
    ("OllamaGenerateRequest", "prompt"): {},
    ("TokenizeRequest", "prompt"): {},
}

#: Fields that are known and not done, by struct, with the values that ask for nothing. Besides those of every request.
REFUSED: dict[str, dict[str, tuple[object, ...]]] = {
    "ResponseRequest": RESPONSES_NOT_SUPPORTED,
    "OllamaOptions": OPTIONS_REFUSED,
    "OllamaGenerateRequest": FIELDS_REFUSED,
    "OllamaMessage": FIELDS_REFUSED,
}
EVERYWHERE: dict[str, tuple[object, ...]] = NOT_SUPPORTED | dict.fromkeys(OLD_NAMES, ())

#: The type of JSON value that each keyword is about.
_ABOUT = {
    "minimum": ("number", "integer"),
    "maximum": ("number", "integer"),
    "exclusiveMinimum": ("number", "integer"),
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "enum": ("string",),
    "minItems": ("array",),
    "maxItems": ("array",),
}


NOT_DONE = "Known but not supported."


def _harmless(struct: str, field: str, untyped: bool) -> tuple[object, ...] | None:
    """The values that a field may have though it is not supported; None if it is."""
    own = REFUSED.get(struct, {}).get(field)
    return EVERYWHERE.get(field) if own is None and untyped else own


def limit(schema: Schema) -> None:
    """Write the limits of its fields into the schema of a struct; fields that are refused have no other values left."""
    for name, field in schema.get("properties", {}).items():
        harmless = _harmless(schema["title"], name, untyped=not field.keys() - {"default"})
        if harmless is not None:
            field.clear()
            values = [value for at, value in enumerate(harmless) if value not in harmless[:at]]  # 1 is 1.0
            field |= {"enum": [None, *values], "default": None, "description": NOT_DONE}
            continue
        limits = OWN_LIMITS.get((schema["title"], name), LIMITS.get(name, {}))
        for branch in field.get("anyOf", [field]):
            fitting = {word: value for word, value in limits.items() if branch.get("type") in _ABOUT[word]}
            branch.update(fitting)
