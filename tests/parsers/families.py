"""Small tokenizers and chat templates in the way of the families whose tool calls are read."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from foresay.server.text.tokenizer import Tokenizer

_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "CALL{% endfor %}{% endif %}{{ m.content }}<|end|>{% endfor %}"
)
_TOOLS = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
_CALL = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_CALLS = {
    "hermes": f"<tool_call>{_CALL}</tool_call>",
    "llama3": "<|python_tag|>" + _CALL.replace('arguments"', 'parameters"'),
    "mistral": f"[TOOL_CALLS][{_CALL}]",
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
    "hermes": template("hermes"),
    "qwen3": template("hermes", _THINKS),
    "deepseek": template("hermes", _BEGUN),
    "qwen3_coder": template("hermes").replace("<tool_call>", "<tool_call>\n<function="),
    "llama3": template("llama3"),
    "mistral": template("mistral"),
    "plain": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}" + _OPEN,
    "effort": "{% if reasoning_effort %}<|system|>effort {{ reasoning_effort }}<|end|>{% endif %}" + template("hermes"),
}
#: Added tokens by family; True: special, so that plain decoding leaves them out.
ADDED = {
    "hermes": {"<tool_call>": False, "</tool_call>": False},
    "qwen3_coder": {"<tool_call>": False, "</tool_call>": False},
    "qwen3": {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False},
    "deepseek": {"<think>": True, "</think>": True},
    "llama3": {"<|python_tag|>": True, "<|eom_id|>": True},
    "mistral": {"[TOOL_CALLS]": True, "[ARGS]": True, "[CALL_ID]": True},
    "plain": {},
    "effort": {},
}
TURNS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
SAMPLE = ['Sure. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', "The fox and the weather"]


def family_tokenizer(family: str, sample: Sequence[str] = SAMPLE) -> Tokenizer:
    """A byte-level BPE with the family's template and tokens; <|end|> (id 0) ends a text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=TURNS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*sample] * 3, trainer)
    backend.add_tokens([AddedToken(token, special=special) for token, special in ADDED[family].items()])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATES[family], eos_token="<|end|>")
    )
