"""LangChain, streamed, and with an answer of a given shape."""

import os
from typing import Literal

from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

url = os.environ.get("FORESAY_URL", "http://127.0.0.1:8000") + "/v1"
model = ChatOpenAI(
    model=OpenAI(base_url=url, api_key="none").models.list().data[0].id,  # the first that is served
    base_url=url,
    api_key="none",
    max_completion_tokens=60,
    seed=1,
)

for chunk in model.stream("Tell me about a fox."):
    print(chunk.content, end="", flush=True)
print()


class Animal(BaseModel):
    """An animal of the story."""

    kind: Literal["fox", "owl", "bear"]
    age: int = Field(ge=0, le=99)


print(model.with_structured_output(Animal, method="json_schema").invoke("Which animal is in the story?"))
