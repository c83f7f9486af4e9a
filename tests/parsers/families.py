"""Small tokenizers and chat templates in the way of the families whose tool calls are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foresay.server.catalog.formats import FORMATS
from foresay.server.text.tokenizer import Tokenizer

#: Formats in which calls are within text.
TOOL_FORMATS = {name: form for name, form in FORMATS.items() if not form.channels}
_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "CALL{% endfor %}{% endif %}{{ m.content }}<|end|>{% endfor %}"
)
_TOOLS = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
_NAME, _ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
_LINE = "{{ '\n' if not loop.first }}"
_CALL = f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'


def _each(parameter: str) -> str:
    """The parameters of a call: K its name, V its value as text."""
    shown = parameter.replace("K", "{{ k }}").replace("V", "{{ v if v is string else v | tojson }}")
    return f"{{% for k, v in c.function.arguments.items() %}}{shown}{{% endfor %}}"


def _within(begin: str, call: str, end: str) -> str:
    """A call, and around all of them two tags."""
    return f"{{% if loop.first %}}{begin}{{% endif %}}{call}{{% if loop.last %}}{end}{{% endif %}}"


#: A call as the family's own template shows it to the model.
_CALLS = {
    "hermes": f"<tool_call>{_CALL}</tool_call>",
    "llama3": "<|python_tag|>" + _CALL.replace('arguments"', 'parameters"'),
    "mistral": f"[TOOL_CALLS][{_CALL}]",
    "qwen3_coder": f"{_LINE}<tool_call>\n<function={_NAME}>\n"
    + _each("<parameter=K>\nV\n</parameter>\n")
    + "</function>\n</tool_call>",
    "seed_oss": f"{_LINE}<seed:tool_call>\n<function={_NAME}>\n"
    + _each("<parameter=K>V</parameter>\n")
    + "</function>\n</seed:tool_call>",
    "minimax_m2": _within(
        "<minimax:tool_call>\n",
        f'<invoke name="{_NAME}">\n' + _each('<parameter name="K">V</parameter>\n') + "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "glm45": f"{_LINE}<tool_call>{_NAME}\n"
    + _each("<arg_key>K</arg_key>\n<arg_value>V</arg_value>\n")
    + "</tool_call>",
    "phi4_mini": f"<|tool_call|>{_CALL}<|/tool_call|>",
    "granite3": _within("<|tool_call|>[", "{{ ', ' if not loop.first }}" + _CALL, "]"),
    "kimi_k2": _within(
        "<|tool_calls_section_begin|>",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": _within(
        "<｜tool▁calls▁begin｜>",
        _LINE
        + "<｜tool▁call▁begin｜>{{ c.type }}{% set tool = c %}{{ '<｜tool▁sep｜>' + tool['function']['name'] }}"
        + "\n```json\n"
        + f"{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _within(
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "cohere": _within(
        "<|START_ACTION|>[\n",
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": '
        + f'"{_NAME}", "parameters": {_ARGUMENTS}}}{{{{ "," if not loop.last }}}}\n',
        "]<|END_ACTION|>",
    ),
    "olmo3": _within(
        "<function_calls>",
        f"{_NAME}("
        + "{% for k, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}"
        + "{% endfor %}){{ '\n' if not loop.last }}",
        "</function_calls>",
    ),
}
_OPEN = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
_THINKS = (
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
#: The prompt ends inside the reasoning.
_BEGUN = "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"


def template(family: str, opening: str = _OPEN) -> str:
    """Lists the tools, then the messages, calls written as the family does."""
    return _TOOLS + _TURNS.replace("CALL", _CALLS[family]) + opening


TEMPLATES = {
    **{family: template(family) for family in _CALLS},
    "qwen3": template("hermes", _THINKS),
    "deepseek": template("hermes", _BEGUN),
    "plain": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _OPEN,
    "effort": "{% if reasoning_effort %}<|system|>effort {{ reasoning_effort }}<|end|>{% endif %}" + template("hermes"),
}
#: In the way of gpt-oss's: one call in a message, with what was thought as long as no answer follows; results behind
#: the name of what was called last.
TEMPLATES["harmony"] = """<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- set said = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if said or tools -%}<|start|>developer<|message|>{{ said }}
{%- for t in tools or [] %}
// {{ t.function.description }}
type {{ t.function.name }} = (_: {
{%- for name, about in t.function.parameters.properties.items() %}
{{ name }}{{ '?' if name not in (t.function.parameters.required or []) }}: {{ about.type }},
{%- endfor %}
}) => any;
{%- endfor -%}<|end|>{%- endif -%}
{%- set last = namespace(name=none) -%}
{%- for m in messages if m.role == 'assistant' and not m.tool_calls -%}
{%- set last.answered = true -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- if m.content and m.thinking -%}{{ raise_exception('both content and thinking') }}{%- endif -%}
{%- if m.thinking and not last.answered -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}
{%- set last.name = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ last.name }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.role == 'user' -%}<|start|>user<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
_OF_GEMMA = (
    *TOOL_FORMATS["gemma4"].control, "<|turn>", "<|think|>", "<|tool>", "<tool|>", "<tool_response|>",
)  # fmt: skip
#: In the way of Gemma 4's: one turn of the model holds its calls, their results and what it says next; arguments are
#: objects, sorted by key; with thinking off an empty thought ends the prompt.
TEMPLATES["gemma4"] = """{%- macro value(one, quoted=true) -%}
{%- if one is none -%}null
{%- elif one is string -%}<|"|>{{ one }}<|"|>
{%- elif one is boolean -%}{{ 'true' if one else 'false' }}
{%- elif one is mapping -%}{{ '{' }}
{%- for key, inner in one | dictsort -%}
{{ ',' if not loop.first }}{{ '<|"|>' + key + '<|"|>' if quoted else key }}:{{ value(inner, quoted) }}
{%- endfor -%}{{ '}' }}
{%- elif one is iterable -%}[
{%- for inner in one -%}{{ ',' if not loop.first }}{{ value(inner, quoted) }}{%- endfor -%}]
{%- else -%}{{ one }}
{%- endif -%}
{%- endmacro -%}
{%- macro members(object) -%}
{%- for key, inner in object | dictsort -%}{{ ',' if not loop.first }}{{ key }}:{{ value(inner, false) }}{%- endfor -%}
{%- endmacro -%}
{%- macro declared(schema) -%}
{%- if schema.description -%}description:{{ value(schema.description) }},{%- endif -%}
{%- if schema.enum -%}enum:{{ value(schema.enum) }},{%- endif -%}
{%- if schema.properties -%}properties:{{ '{' }}
{%- for key, inner in schema.properties | dictsort -%}
{{ ',' if not loop.first }}{{ key }}:{{ '{' }}{{ declared(inner) }}{{ '}' }}
{%- endfor -%}{{ '},' }}
{%- endif -%}
{%- if schema.required -%}required:{{ value(schema.required) }},{%- endif -%}
type:{{ value((schema.type or 'object') | upper) }}
{%- endmacro -%}
{%- macro unthought(text) -%}
{%- for part in text.split('<channel|>') -%}{{ part.split('<|channel>')[0] }}{%- endfor -%}
{%- endmacro -%}
{%- set thinks = enable_thinking | default(false) -%}
{%- set told = messages[0].role == 'system' -%}
{%- set rest = messages[1:] if told else messages -%}
{%- if thinks or tools or told -%}
{{ '<|turn>system\n' }}{{ '<|think|>\n' if thinks }}{{ messages[0].content | trim if told }}
{%- for t in tools or [] -%}
<|tool>declaration:{{ t.function.name }}{{ '{' -}}
description:{{ value(t.function.description or '') }},parameters:{{ '{' }}
{{- declared(t.function.parameters) }}{{ '}}' }}<tool|>
{%- endfor -%}
{{ '<turn|>\n' }}
{%- endif -%}
{%- set at = namespace(asked=-1, before='', open=false, shown='') -%}
{%- for m in rest -%}{%- if m.role == 'user' -%}{%- set at.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in rest -%}
{%- if m.role != 'tool' -%}
{%- set at.shown = '' -%}
{%- if not (m.role == 'assistant' and at.before == 'assistant') -%}
{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- endif -%}
{%- if m.reasoning_content and loop.index0 > at.asked -%}
{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}
{%- endif -%}
{%- set results = namespace(ended=false) -%}
{%- for c in m.tool_calls or [] -%}
{%- if c.function.arguments is not mapping -%}{{ raise_exception('arguments must be a mapping') }}{%- endif -%}
<|tool_call>call:{{ c.function.name }}{{ '{' }}{{ members(c.function.arguments) }}{{ '}' }}<tool_call|>
{%- set at.shown = 'calls' -%}
{%- endfor -%}
{%- for other in rest[loop.index:] if m.tool_calls and not results.ended -%}
{%- if other.role == 'tool' -%}
{%- for c in m.tool_calls if c.id == other.tool_call_id -%}
<|tool_response>response:{{ c.function.name }}{{ '{' }}value:{{ value(other.content) }}{{ '}' }}<tool_response|>
{%- endfor -%}
{%- set at.shown = 'results' -%}
{%- else -%}{%- set results.ended = true -%}
{%- endif -%}
{%- endfor -%}
{%- set content = (unthought(m.content) if m.role == 'assistant' else m.content) | trim -%}
{{ content }}
{%- set next = rest[loop.index:] | rejectattr('role', 'equalto', 'tool') | list -%}
{%- set goes_on = m.role == 'assistant' and next and next[0].role == 'assistant' and at.shown != 'calls' -%}
{%- if at.shown == 'calls' -%}<|tool_response>
{%- elif not goes_on and not (at.shown == 'results' and not content and not next) -%}{{ '<turn|>\n' }}
{%- endif -%}
{%- set at.before = m.role -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if not at.shown -%}{{ '<|turn>model\n' }}{%- endif -%}
{%- if not thinks -%}{{ '<|channel>thought\n<channel|>' }}
{%- elif at.shown == 'results' -%}{{ '<|channel>thought\n' }}
{%- endif -%}
{%- endif -%}"""
#: The smallest ones' has no empty thought.
TEMPLATES["gemma4_small"] = TEMPLATES["gemma4"].replace("{%- if not thinks -%}", "{%- if false -%}")
#: Added tokens by family; True: special, so that plain decoding leaves them out.
ADDED = {
    **{
        family: dict.fromkeys(form.tags, "｜" in form.begins or "|" in form.begins)
        for family, form in TOOL_FORMATS.items()
    },
    "hermes": {"<tool_call>": False, "</tool_call>": False},
    "qwen3_coder": {"<tool_call>": False, "</tool_call>": False},
    "qwen3": {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False},
    "deepseek": {"<think>": True, "</think>": True},
    "llama3": {"<|python_tag|>": True, "<|eom_id|>": True},
    "mistral": {"[TOOL_CALLS]": True, "[ARGS]": True, "[CALL_ID]": True},
    "seed_oss": {"<seed:tool_call>": False, "</seed:tool_call>": False},
    "minimax_m2": {"<minimax:tool_call>": False, "</minimax:tool_call>": False},
    "plain": {},
    "effort": {},
    **dict.fromkeys(("gemma4", "gemma4_small"), dict.fromkeys(_OF_GEMMA, True)),
    "harmony": dict.fromkeys(("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>"), True),
}
TURNS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SAMPLE = ['Sure. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', "The fox and the weather"]


def written(tokenizer: Tokenizer, *calls: tuple[str, dict[str, Any]]) -> str:
    """What the assistant writes if it makes these calls, by the template."""
    made = [
        {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": made},
    ]
    shown = tokenizer.render(turns, add_generation_prompt=False).text
    for begin, end in (("<|assistant|>", "<|end|>"), ("<|turn>model\n", "<|tool_response>")):
        if begin in shown:
            return shown.partition(begin)[2].removesuffix(end)
    raise AssertionError("no turn of the assistant's")


def family_tokenizer(family: str, sample: Sequence[str] = SAMPLE) -> Tokenizer:
    """A byte-level BPE with the family's template and tokens; the one with id 0 ends a text."""
    end = {"harmony": "<|return|>", "gemma4": "<turn|>", "gemma4_small": "<turn|>"}.get(family, "<|end|>")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=[end, *TURNS[1:]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*sample] * 3, trainer)
    backend.add_tokens([AddedToken(token, special=special) for token, special in ADDED[family].items()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATES[family], eos_token=end))
