"""Replicas on a real Ray: killed, scaled and updated under streams."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.replicas.storm import REQUESTS, answered, processes
from tests.server.live import LiveServer

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'foresay[ray]'"),
]


def test_nothing_is_lost_where_replicas_are_killed_scaled_and_updated():
    command = [sys.executable, "-m", "tests.replicas.storm"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert reported["wrong"] == [] and reported["answers"] > 10
    assert reported["update"]["status"] == "replaced"


async def test_streams_outlive_rays_head(tmp_path: Path) -> None:
    """Ray ends whatever spoke to its head a minute later; the server starts it again."""

    async def ask() -> object:
        while isinstance(answer := await answered(client, REQUESTS[2]), str) and answer.startswith("503"):
            refused.append(answer)
            await asyncio.sleep(0.2)
        return answer

    refused: list[str] = []
    flags = ("--replicas", "1", "--draft", "none", "--threads", "1", "--max-resumes", "1000")
    with LiveServer(tmp_path / "log", *flags) as server:
        async with aiohttp.ClientSession(server.wait_for_url(), timeout=aiohttp.ClientTimeout(total=None)) as client:
            expected = await ask()
            [head] = processes("gcs_server")
            asking = asyncio.create_task(ask())
            os.kill(head, signal.SIGKILL)
            assert await asking == expected and not refused, "nobody needs it"
            async with asyncio.timeout(300):
                while "Ray is back" not in server.output:
                    assert await ask() == expected
            assert await ask() == expected
        server.terminate()
        assert await asyncio.to_thread(server.process.wait, 120) == 0
        assert [each for name in ("gcs_server", "raylet", "ray::") for each in processes(name)] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
def test_the_file_that_deploy_writes_is_one_of_serves():
    import yaml  # type: ignore[import-untyped]
    from ray.serve.schema import ServeDeploySchema

    from foresay.server.cli.serve import serve_file
    from foresay.server.settings.config import ServeConfig

    written = yaml.safe_load(serve_file(ServeConfig(replicas="1-2", draft="ngram", threads=1)))
    schema = ServeDeploySchema.model_validate(written)
    assert schema.applications[0].args == {"draft": "ngram", "threads": 1, "replicas": "1-2"}
