"""Arguments from Python callers: they may have any type, and errors name arguments instead of flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from foresay.server.settings.config import EngineConfig
from foresay.server.settings.fields import nearest
from foresay.server.text.options import spelled_words, typed
from foresay.server.text.tokenizer import Tokenizer
from foresay.spec.errors import InvalidRequest
from foresay.spec.sampling import SamplingParams

FIELDS = SamplingParams.__struct_fields__
#: Further keyword arguments of ``generate``.
OTHER_ARGUMENTS = ("n", "stop", "structured_outputs")


def sampling_of(params: SamplingParams | None, fields: Mapping[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """``params`` updated with ``fields``, types checked; bad words given as text become token ids."""
    for name in fields:
        if name not in FIELDS:
            raise InvalidRequest(name, f" is not a sampling field{nearest(name, (*FIELDS, *OTHER_ARGUMENTS))}")
    params = msgspec.structs.replace(params or SamplingParams(), **_spelled(fields, tokenizer))
    return SamplingParams(
        **{
            field.name: typed(getattr(params, field.name), field.type, field.name)
            for field in msgspec.structs.fields(SamplingParams)
        }
    )


def _spelled(fields: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    words = typed(fields.get("bad_words", ()), list[str | list[int]], "bad_words")
    texts = [word for word in words if isinstance(word, str)]
    if not texts:
        return dict(fields)
    ids = tuple(tuple(word) for word in words if not isinstance(word, str))
    return {**fields, "bad_words": ids + spelled_words(texts, tokenizer)}


def is_one(prompt: str | list[Any]) -> bool:
    """Whether this is a single prompt: text, or token ids."""
    return isinstance(prompt, str) or any(not isinstance(entry, str | list | tuple) for entry in prompt)


def of_arguments(message: str) -> str:
    """A message with flags renamed to Python arguments: ``--draft-tokens`` to ``draft_tokens``, ``TARGET`` to
    ``target``."""
    names = {name.replace("_", "-"): name for name in EngineConfig.__struct_fields__}
    of_flags = re.sub(r"--([a-z][a-z-]*)", lambda flag: names.get(flag[1], flag[0]), message)
    return re.sub(r"\bTARGET\b", "target", of_flags)
