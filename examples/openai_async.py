"""The official client, several streams at once: the server decodes them in one batch."""

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("FORESAY_URL", "http://127.0.0.1:8000")


async def tell(client: AsyncOpenAI, model: str, about: str) -> str:
    """A story, streamed."""
    stream = await client.completions.create(
        model=model, prompt=f"Once upon a time there was {about}", max_tokens=40, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def main() -> None:
    """Three stories side by side."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id  # the first that is served
        for story in await asyncio.gather(*(tell(client, model, who) for who in ("a fox", "a king", "an old woman"))):
            print(story.strip(), end="\n---\n")


asyncio.run(main())
