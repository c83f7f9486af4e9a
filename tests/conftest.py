from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
import torch

from bench.inflate import inflate
from server.resolved import BUNDLED
from tests.server.live import LiveServer, openai_client


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and lose much of their time to them on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled pair behind a real server, which whoever uses it leaves as it was."""
    with LiveServer(tmp_path_factory.mktemp("serve") / "log", "--max-seqs", "4") as server:
        yield server.wait_for_url()


@pytest.fixture(scope="session")
def slow_target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled target made as slow as drafting needs to pay for sure: it says the same."""
    directory = tmp_path_factory.mktemp("slow") / "target"
    inflate(BUNDLED / "target", directory, "layers=40")
    return str(directory)


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(url) as client:
        yield client


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: with several workers, nobody is left with a long one in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
