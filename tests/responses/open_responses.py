"""What Open Responses (the specification of 2026-04-24) says of answers and events, as a table to hold them to.

A line names a type and its fields. ``?`` behind a field's type: it may be null; behind its name: it may be missing.
``[..]`` is a list of these. Objects of one of several types are told apart by ``type``. Fields that are not named are
extensions, which the specification allows. One name is OpenAI's, which its clients know: ``reasoning_text`` of events,
there ``reasoning``.
"""

from __future__ import annotations

from typing import Any

_TYPES = """
response = id:str object:str created_at:int completed_at:int? status:str incomplete_details:reason? model:str
    previous_response_id:str? instructions:str? output:[item] error:failure? tools:[tool] tool_choice:choice
    truncation:str parallel_tool_calls:bool text:format_of_text top_p:num presence_penalty:num frequency_penalty:num
    top_logprobs:int temperature:num reasoning:reasoning? usage:usage? max_output_tokens:int? max_tool_calls:int?
    store:bool background:bool service_tier:str metadata:any safety_identifier:str? prompt_cache_key:str?
compaction_of_items = id:str object:str output:[item] created_at:int usage:usage
reason = reason:str
failure = code:str message:str
error_payload = type:str code:str? message:str param:str?
usage = input_tokens:int output_tokens:int total_tokens:int input_tokens_details:cached output_tokens_details:thought
cached = cached_tokens:int
thought = reasoning_tokens:int
reasoning = effort:str? summary:str?
format_of_text = format:format verbosity?:str
logprob = token:str logprob:num bytes:[int] top_logprobs:[top_logprob]
top_logprob = token:str logprob:num bytes:[int]
"""
#: By the value of ``type``.
_TAGGED = {
    "item": """
message = id:str status:str role:str content:[content]
function_call = id:str call_id:str name:str arguments:str status:str
function_call_output = id:str call_id:str output:any status:str
reasoning = id:str content?:[content] summary:[content] encrypted_content?:str
compaction = id:str encrypted_content:str
""",
    "content": """
input_text = text:str
output_text = text:str annotations:[any] logprobs?:[logprob]
summary_text = text:str
reasoning_text = text:str
refusal = refusal:str
""",
    "tool": "function = name:str description:str? parameters:any strict:bool?",
    "choice": """
function = name?:str
allowed_tools = tools:[choice] mode:str
""",
    "format": """
text =
json_object =
json_schema = name:str description:str? schema:any strict:bool
""",
    "event": "\n".join(
        [f"response.{life} = sequence_number:int response:response"
         for life in ("created", "queued", "in_progress", "completed", "failed", "incomplete")]
        + [f"response.output_item.{life} = sequence_number:int output_index:int item:item"
           for life in ("added", "done")]
        + [f"response.{name} = sequence_number:int item_id:str output_index:int {more}" for name, more in {
            "content_part.added": "content_index:int part:content",
            "content_part.done": "content_index:int part:content",
            "output_text.delta": "content_index:int delta:str logprobs?:[logprob]",
            "output_text.done": "content_index:int text:str logprobs?:[logprob]",
            "reasoning_text.delta": "content_index:int delta:str",
            "reasoning_text.done": "content_index:int text:str",
            "function_call_arguments.delta": "delta:str",
            "function_call_arguments.done": "arguments:str",
        }.items()]
        + ["error = sequence_number:int error:error_payload"]
    ),
}  # fmt: skip
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "num": (int, float), "bool": (bool,)}


def _read(table: str) -> dict[str, list[str]]:
    lines = table.replace("\n    ", " ").strip().splitlines()
    return {line.partition(" =")[0]: line.partition(" =")[2].split() for line in lines}


TYPES, TAGGED = _read(_TYPES), {name: _read(table) for name, table in _TAGGED.items()}


def wrong(kind: str, value: Any, at: str = "") -> list[str]:
    """Where ``value`` is not of the kind that the specification has there."""
    if kind == "any" or (kind == "choice" and value in ("none", "auto", "required")):
        return []
    if kind.startswith("["):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [error for index, one in enumerate(value) for error in wrong(kind[1:-1], one, f"{at}.{index}")]
    if kind in _PLAIN:
        fits = isinstance(value, _PLAIN[kind]) and (kind == "bool" or not isinstance(value, bool))
        return [] if fits else [f"{at}: {value!r} is no {kind}"]
    fields = TAGGED[kind].get(str(value.get("type"))) if kind in TAGGED and isinstance(value, dict) else TYPES.get(kind)
    if fields is None or not isinstance(value, dict):
        return [f"{at}: {value!r} is no {kind}"]
    return [error for field in fields for error in _wrong_field(field, value, at)]


def _wrong_field(field: str, value: dict[str, Any], at: str) -> list[str]:
    name, _, kind = field.partition(":")
    key = name.rstrip("?")
    if key not in value:
        return [] if name.endswith("?") else [f"{at}.{key} is missing"]
    if value[key] is None and kind.endswith("?"):
        return []
    return wrong(kind.rstrip("?"), value[key], f"{at}.{key}")
