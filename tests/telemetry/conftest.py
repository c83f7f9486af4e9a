from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.live import LiveServer


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled pair behind a real server, watched in every way there is."""
    flags = ("--threads", "1", "--kv-tokens", "8192", "--max-seqs", "4", "--self-check", "1")
    with LiveServer(tmp_path_factory.mktemp("serve") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def url(live: LiveServer) -> str:
    return live.wait_for_url()
