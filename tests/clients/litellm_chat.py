"""LiteLLM against a server whose model calls a tool: what it makes of chats, whole and streamed, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm  # type: ignore[import-not-found]  # lives in an environment of its own

URL = os.environ["FORESAY_URL"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    "max_tokens": 300,
    "num_retries": 0,
}
#: The provider's prefix and where it looks for the API.
PROVIDERS = {"openai": f"{URL}/v1", "anthropic": URL, "ollama_chat": URL}


def told(message: Any) -> dict[str, Any]:
    """What counts of a message."""
    (call,) = message.tool_calls
    return {"content": message.content, "name": call.function.name, "arguments": json.loads(call.function.arguments)}


def main() -> None:
    """Print what each provider's answers come to."""
    output: dict[str, Any] = {}
    for provider, base in PROVIDERS.items():
        ask = ASK | {"model": f"{provider}/toy", "api_base": base, "api_key": "none"}
        whole = litellm.completion(**ask)
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)))
        output[provider] = [told(answer.choices[0].message) for answer in (whole, streamed)]
    print(json.dumps(output))


main()
