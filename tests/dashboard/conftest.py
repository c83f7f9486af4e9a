from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.dashboard.browsing import CHROMIUM, chromium


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[None]:
    """A Chromium for every visit."""
    if CHROMIUM is None and not os.environ.get("CI"):
        pytest.skip("needs Chromium (apt install chromium)")
    async with chromium():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that open the page run in one event loop, the one of the browser that they share."""
    for item in items:
        if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
