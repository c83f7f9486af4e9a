"""Two targets behind a real server on a machine that holds one: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from foresay.server.settings.resolved import BUNDLED
from tests.checking.pairs import make_model
from tests.server.live import LiveServer, openai_client
from tests.server.patched import PACED, existing, patched_path

pytestmark = pytest.mark.slow
TOY, TINY = NAMES = ("first", "second")
ASK: dict[str, Any] = {"prompt": "ab", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
#: What a sitecustomize makes of the machine: too small for two of the bundled target, large enough for one and more.
SMALL_MACHINE = """
import os
_sysconf = os.sysconf
os.sysconf = lambda name: 56 * 2**20 // _sysconf("SC_PAGE_SIZE") if name == "SC_PHYS_PAGES" else _sysconf(name)
"""


def settings(folder: Path, most: str = "max_loaded_models = 1\n") -> Path:
    """A settings file with the bundled target and a random one. most: of them one is loaded at a time."""
    make_model(folder / "tiny", num_hidden_layers=2)
    file = folder / "foresay.toml"
    engine = '[engine]\ndraft = "none"\nmax_model_len = 256\nmax_seqs = 2\nthreads = 1\n'
    targets = zip(NAMES, (BUNDLED / "target", folder / "tiny"), strict=True)
    models = "".join(f'[models.{name}]\ntarget = "{target}"\n' for name, target in targets)
    file.write_text(f"{engine}[server]\n{most}{models}")
    return file


def serving(folder: Path, file: Path, *flags: str, **variables: str) -> LiveServer:
    return LiveServer(folder / "log", "--config", str(file), "--draft", "none", *flags, variables=variables)


async def states(url: str) -> dict[str, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
        assert response.status == 200
        models: dict[str, str] = (await response.json())["models"]
        return models


async def until_state(url: str, name: str, state: str) -> None:
    async with asyncio.timeout(120):
        while (await states(url))[name] != state:
            await asyncio.sleep(0.02)


async def test_sigterm_while_a_model_is_loaded_ends_the_server_and_refuses_what_waits(tmp_path):
    flags = ("--drain-seconds", "3600")  # what ends does not wait for that
    with serving(tmp_path, settings(tmp_path), *flags, PYTHONPATH=patched_path(PACED, tmp_path)) as server:
        url = server.wait_for_url()
        async with openai_client(url) as client:
            await client.completions.create(model=TOY, **ASK)
            with existing(tmp_path / "held"):
                asking = asyncio.create_task(client.completions.create(model=TINY, **ASK))
                await until_state(url, TINY, "loading")
                server.terminate()
                with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                    await asking
            assert refused.value.status_code == 503
            assert await asyncio.to_thread(server.process.wait, 180) == 0


async def test_the_memory_plan_decides_which_models_fit_together(tmp_path):
    file = settings(tmp_path, "")
    file.write_text(f'{file.read_text()}[models.twin]\ntarget = "bundled"\n')
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SMALL_MACHINE)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    with serving(tmp_path, file, PYTHONPATH=path) as server:
        url = server.wait_for_url()
        async with openai_client(url) as client:
            for name, loaded in ((TOY, {TOY}), (TINY, {TOY, TINY}), ("twin", {TINY, "twin"})):
                await client.completions.create(model=name, **ASK)
                assert {one for one, state in (await states(url)).items() if state == "ok"} == loaded, server.output
            assert len(server.engine_processes()) == 2
