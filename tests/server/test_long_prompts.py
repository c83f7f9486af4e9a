"""Long texts are read outside the event loop."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.routes.apis import APIS, RAW
from tests.server.scripted import END, ScriptedEngine, served
from tests.server.test_control_tokens import STYLES, controls, styled


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40)
@given(data=st.data())
def test_ids_are_the_librarys(style, data) -> None:
    tokenizer = styled(style)
    words = st.one_of(
        st.text(max_size=4), st.sampled_from([*controls(tokenizer), "<tool_call>", "<think>", "e\u0301", "  "])
    )
    text = "".join(data.draw(st.lists(words, max_size=20)))
    for special in (True, False):
        assert tokenizer.encode(text, special) == tokenizer._backend.encode(text, add_special_tokens=special).ids


def test_a_text_is_read_without_the_interpreters_lock() -> None:
    """Another thread goes on meanwhile: held, its pause would be as long as the reading every time."""
    tokenizer = styled("bundled")
    text = "Once upon a time there was a fox. " * 20_000

    def share() -> float:
        pauses, over = [0.0], threading.Event()

        def watch() -> None:
            last = time.perf_counter()
            while not over.is_set():
                time.sleep(0.001)
                pauses.append(time.perf_counter() - last)
                last += pauses[-1]

        watcher = threading.Thread(target=watch)
        watcher.start()
        began = time.perf_counter()
        tokenizer.encode(text)
        took = time.perf_counter() - began
        over.set()
        watcher.join()
        return max(pauses) / took

    assert any(share() < 0.5 for _ in range(20)), "a busy machine makes others pause, but not always"


LONG = "Once upon a fox. " * 60_000
DOORS = [*APIS.values(), RAW]


@pytest.mark.parametrize("api", DOORS, ids=lambda api: api.path)
async def test_what_cannot_fit_is_refused(api, tokenizer) -> None:
    async with served(ScriptedEngine([END]), tokenizer) as client:
        response = await client.post(api.path, json=api.asking(LONG))
        assert response.status == 400
        assert "maximum context length is 512 tokens. However, you requested at least" in await response.text()


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_a_prompt_that_is_cut_is_read(name, tokenizer) -> None:
    engine = ScriptedEngine([END])
    async with served(engine, tokenizer) as client:
        body = APIS[name].asking(LONG, truncate_prompt_tokens=7, max_tokens=1)
        assert (await client.post(APIS[name].path, json=body)).status == 200
    assert len(engine.requests[0].prompt) == 7
