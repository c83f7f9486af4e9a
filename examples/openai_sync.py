"""The official client, one answer at a time: whole, streamed, and how drafting went."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("FORESAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id  # the first that is served
question = {"role": "user", "content": "How many is 3 times 12?"}

answer = client.chat.completions.create(model=model, messages=[question], max_completion_tokens=40, seed=1)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[question],
    max_completion_tokens=40,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        drafting = chunk.metrics["speculative_decoding"]
        print(f"\n{chunk.usage.completion_tokens} tokens, {drafting['mean_acceptance_length']:.2f} a step")
