"""The official client over a WebSocket: one connection, a conversation, no upload twice."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("FORESAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id  # the first that is served

with client.responses.connect() as connection:
    previous = None
    for text in ("Tell me about a fox.", "And then?"):
        connection.response.create(
            model=model, input=text, max_output_tokens=40, previous_response_id=previous, store=False
        )
        for event in connection:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type in ("response.completed", "response.incomplete"):
                previous = event.response.id
                usage = event.response.usage
                print(f"\n[{usage.input_tokens} in, {usage.input_tokens_details.cached_tokens} of them warm]")
                break
            elif event.type in ("response.failed", "error"):
                raise SystemExit(event.to_json())
