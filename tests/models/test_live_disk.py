"""What a real server has read is found again after a swap of models, a reload, a restart and a crash."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import aiohttp
import pytest

from foresay.server.settings.resolved import BUNDLED
from foresay.verifier.ops.kernels.cpu import kernel_cache
from tests.server.live import LiveServer, openai_client
from tests.server.wire import until

pytestmark = pytest.mark.slow
KEY = "an-admin-key-of-a-test"
NAMES = ("first", "second")


class Restarted:
    """A server of two models of which one is loaded at a time; each time that it is started it has the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, cache = folder, folder / "cache" / "foresay"
        cache.mkdir(parents=True)
        (cache / "kernels").symlink_to(kernel_cache.directory())
        self.files = cache / "kv"
        models = "".join(
            f'[models.{name}]\ntarget = "{BUNDLED / kind}"\n'
            for name, kind in zip(NAMES, ("target", "draft"), strict=True)
        )
        engine = '[engine]\nmax_seqs = 2\nthreads = 1\nkv_disk = "1GiB"\n'
        (folder / "foresay.toml").write_text(f"{engine}[server]\nmax_loaded_models = 1\n{models}")

    def __call__(self) -> LiveServer:
        flags = ("--config", str(self.folder / "foresay.toml"), "--draft", "suffix", "--admin-key", KEY)
        variables = {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "FORESAY_KV_DISK": "1GiB",
            "KNOWN_COSTS_TIMES": "1e3",
        }
        return LiveServer(self.folder / "log", *flags, variables=variables)

    def written(self) -> int:
        return len(list(self.files.glob("*/*.rows")))


async def ask(server: LiveServer, model: str, begin: int) -> tuple[str, int]:
    """The answer to 600 tokens, and how many of them were found."""
    prompt = [begin, *(100 + number % 300 for number in range(599))]
    async with openai_client(server.wait_for_url()) as client:
        answer = await client.completions.create(model=model, prompt=prompt, max_tokens=20, temperature=0)
    details = answer.usage.prompt_tokens_details if answer.usage else None
    return answer.choices[0].text, details.cached_tokens or 0 if details else 0


async def reload(server: LiveServer, model: str) -> None:
    async with aiohttp.ClientSession(server.wait_for_url(), headers={"Authorization": f"Bearer {KEY}"}) as client:
        body = {"model": model, "settings": {"max_seqs": 3}}
        async with client.post("/admin/reload", json=body) as response:
            assert response.status == 200, await response.text()


async def test_what_was_read_is_found_again(tmp_path: Path) -> None:
    restarted, (one, other) = Restarted(tmp_path), NAMES
    with restarted() as server:
        text, cached = await ask(server, one, 5)
        assert cached == 0
        assert (await ask(server, other, 5))[1] == 0
        assert await ask(server, one, 5) == (text, 592), "after a swap and back"
        await reload(server, one)
        assert await ask(server, one, 5) == (text, 592), "after a reload"
        server.terminate()
        assert server.process.wait(180) == 0
    with restarted() as server:
        assert await ask(server, one, 5) == (text, 592), "after a restart"
        before = restarted.written()
        text, cached = await ask(server, one, 6)
        assert cached == 0
        await until(lambda: restarted.written() >= before + 37)  # it is idle now
        for process in (*server.engine_processes(), server.process.pid):
            os.kill(process, signal.SIGKILL)
    with restarted() as server:
        assert await ask(server, one, 6) == (text, 592), "after it was killed"
