"""An agent that asks for answers of a known shape: what the schema leaves no choice about is drafted for free.

The keys, quotes and brackets of the JSON are forced by the grammar, so they come in few steps whatever the model.
"""

import os
import time
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=os.environ.get("FORESAY_URL", "http://127.0.0.1:8000") + "/v1", api_key="none")
model = client.models.list().data[0].id  # the first that is served


class Step(BaseModel):
    """What to do next."""

    name_of_the_tool_to_call: Literal["search_the_library", "ask_the_user", "finish_the_task"]
    how_confident_in_percent: int = Field(ge=0, le=100)
    needs_confirmation_by_a_person: bool


begun = time.perf_counter()
answer = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "The user asks for a story about a fox. What is the next step?"}],
    response_format=Step,
    max_completion_tokens=120,
    seed=1,
)
seconds = time.perf_counter() - begun
print(answer.choices[0].message.parsed)
drafting = answer.metrics["speculative_decoding"]
tokens = answer.usage.completion_tokens
print(f"{tokens} tokens in {seconds:.2f} s, {drafting['mean_acceptance_length']:.1f} tokens a step")
