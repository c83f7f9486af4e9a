"""Families' formats of tool calls and reasoning: an entry here is all that a new format needs.

``text.parsers.chat_format`` reads what an entry describes; ``text.grammars.answers`` makes the grammar that forces it.
White space in it is what the grammar writes; a reader accepts any, or none.
"""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

#: A whole tag, which a tokenizer may have as one special token.
TAG = re.compile(r"<[^<>{}]+>|\[[A-Z_]+\]")
PLACEHOLDER = re.compile(r"\{(name|id|index|arguments|parameters|key|value)\}")


class Way(msgspec.Struct, frozen=True):
    """A way of writing calls. opens, closes: around all of them; between: separates them.

    call: one call. ``{arguments}`` is a JSON object. A call that is itself an object may have its keys in any order,
    and further ones. With ``{index}``, the call's number, the id is made of the text around the name; ``{id}`` is the
    model's own id.
    quote: if given, ``{arguments}`` are read in Gemma 4's notation, too: strings between two of these, and bare keys.
    parameter: one of ``{parameters}``. A value between tags is bare text if the function's schema says so, else JSON;
    line ends next to it are not part of it if they are next to ``{value}``. Without tags, parameters are Python's.
    """

    call: str
    opens: str = ""
    between: str = ""
    closes: str = ""
    parameter: str = ""
    quote: str = ""


class ToolFormat(msgspec.Struct, frozen=True, dict=True):
    """A format of tool calls; by default that of a model that writes none.

    begins: the tag at which text ends and calls begin. ways: readers try them in this order; grammars use the first
    whose tags are all tokens, or else the last. signs: a template with one of these, or with ``begins`` if there are
    none, has this format. bare: calls may also begin the answer, without the tag; then only offered functions count as
    calls. alone: a call may also be all of the answer, without tags, perhaps in a fence. id: prefix and length of the
    ids of calls. wraps: tags around the answer's text, which are left out; one that reasoning begins with may begin it
    again. ends: tags that end the answer, even if the checkpoint does not say so.
    channels: an answer is messages, each on a channel, between tokens. thinks: the tags around reasoning, if they are
    none of :data:`REASONING`. efforts: the only ones that its template accepts; then it always thinks. conversation:
    what its template expects, by the name in :data:`foresay.server.text.conversation.SHAPES`.
    """

    begins: str = ""
    ways: tuple[Way, ...] = ()
    signs: tuple[str, ...] = ()
    bare: bool = False
    alone: bool = False
    id: tuple[str, int] = ("call_", 24)
    wraps: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    channels: bool = False
    thinks: tuple[str, str] | None = None
    efforts: tuple[str, ...] = ()
    conversation: str = ""

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """All whole tags of its calls, ``begins`` first."""
        texts = (text for way in self.ways for text in msgspec.structs.astuple(way))
        return tuple(dict.fromkeys([self.begins, *(tag for text in texts for tag in TAG.findall(text))]))

    @property
    def control(self) -> tuple[str, ...]:
        """Those, and the tags around text and behind it."""
        return *self.tags, *self.wraps, *self.ends


#: Names of the list of tools in templates.
TOOLS_VARIABLES = ("tools", "xml_tools")
#: The reasoning efforts of requests.
EFFORTS = ("low", "medium", "high")
_OBJECT = '{"name": "{name}", "arguments": {arguments}}'

#: By the name that ``--tool-parser`` takes. The first with a sign in the template is used.
# fmt: off
FORMATS: dict[str, ToolFormat] = {
    "mistral": ToolFormat("[TOOL_CALLS]", (  # the last: up to tokenizer v7, the others: since v11
        Way("[TOOL_CALLS]{name}[ARGS]{arguments}"),
        Way("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}"),
        Way("[TOOL_CALLS]{name}{arguments}"),
        Way(_OBJECT, "[TOOL_CALLS][", ", ", "]"),
    ), id=("", 9)),
    "seed_oss": ToolFormat("<seed:tool_call>", (Way(
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>", between="\n",
        parameter="<parameter={key}>{value}</parameter>\n"),)),
    "minimax_m2": ToolFormat("<minimax:tool_call>", (Way(
        '<invoke name="{name}">\n{parameters}</invoke>\n', "<minimax:tool_call>\n", "", "</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n'),)),
    "glm45": ToolFormat("<tool_call>", (Way(
        "<tool_call>{name}\n{parameters}</tool_call>", between="\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),), signs=("<arg_key>",)),
    "qwen3_coder": ToolFormat("<tool_call>", (Way(
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>", between="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n"),), signs=("<function=",)),
    "hermes": ToolFormat("<tool_call>", (Way(f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),), alone=True),
    "phi4_mini": ToolFormat("<|tool_call|>", (
        Way(f"<|tool_call|>{_OBJECT}<|/tool_call|>"),
        Way(_OBJECT, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    ), signs=("<|/tool_call|>",)),
    "granite3": ToolFormat("<|tool_call|>", (Way(_OBJECT, "<|tool_call|>[", ", ", "]"),)),
    "kimi_k2": ToolFormat("<|tool_calls_section_begin|>", (Way(
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),)),
    "deepseek_v3": ToolFormat("<｜tool▁calls▁begin｜>", (Way(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),),
        signs=("<｜tool▁sep｜>' + tool['function']['name']",)),
    "deepseek_v31": ToolFormat("<｜tool▁calls▁begin｜>", (Way(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),)),
    "cohere": ToolFormat("<|START_ACTION|>", (Way(
        '{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}',
        "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"),
    ), wraps=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
    "olmo3": ToolFormat("<function_calls>", (
        Way("{name}({parameters})", "<function_calls>", "\n", "</function_calls>", parameter="{key}={value}"),)),
    "gemma4": ToolFormat("<|tool_call>", (Way("<|tool_call>call:{name}{arguments}<tool_call|>", quote='<|"|>'),),
        signs=("<|tool_call>call:",), wraps=("<|channel>", "<channel|>"), ends=("<|tool_response>",),
        conversation="objects"),
    "llama3": ToolFormat("<|python_tag|>", (Way('{"name": "{name}", "parameters": {arguments}}', between="; "),),
        signs=("<|python_tag|>", "Environment: ipython"), bare=True),
    "harmony": ToolFormat("<|channel|>", (Way(
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        between="<|call|><|start|>assistant"),),
        signs=("<|channel|>analysis<|message|>",), wraps=("<|start|>", "<|message|>", "<|end|>", "<|return|>"),
        channels=True, thinks=("<|channel|>analysis<|message|>", "<|end|>"), efforts=EFFORTS, conversation="channels"),
}
# fmt: on

#: The tags around reasoning, by the name that ``--reasoning-parser`` takes. The first with a tag in the template are
#: used. White space next to them belongs to neither reasoning nor answer.
REASONING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}
