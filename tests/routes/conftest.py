from __future__ import annotations

import pytest

from foresay.server.text.tokenizer import Tokenizer
from tests.server.conftest import byte_level_tokenizer
from tests.server.scripted import END
from tests.server.wire import STORY


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


#: A template in the way of Qwen: tools in the system message, thinking on demand, calls as JSON between tags.
AGENT_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }} <tool_call><|end|>{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def agent() -> Tokenizer:
    """The tokenizer of a model that thinks and calls tools."""
    return byte_level_tokenizer(AGENT_TEMPLATE)


@pytest.fixture
def script(tokenizer) -> list[int]:
    """The tokens of the story and the end token."""
    return [*tokenizer.encode(STORY), END]
