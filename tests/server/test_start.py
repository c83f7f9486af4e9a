"""Processes until an engine is ready and after it: what is imported and started when. The server's process does without
torch, with which it would hold 390 MB more and be ready a second later."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from foresay.server.cli.main import main
from foresay.server.engine_process import child
from foresay.server.engine_process.child import ahead, state_of
from foresay.server.settings.resolved import BUNDLED, nothing_to_fetch
from foresay.server.text.tokenizer import loader_of
from foresay.verifier.ops.kernels.cpu.compiler import NAME
from tests.server.live import LiveServer, openai_client


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout


def children() -> set[str]:
    """Ids of the processes that this thread has started and that are there, dead or alive."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_engine_process_is_started_before_anything_large_is_imported() -> None:
    code = (
        "import sys; from foresay.server.engine_process import child\n"
        "def spawn(*given):\n"
        "    print(*sys.modules.keys() & {'aiohttp', 'asyncio', 'numpy', 'torch', 'transformers'}, len(sys.modules))\n"
        "    raise SystemExit\n"
        "child.spawn = spawn\n"
        "from foresay.server.cli.main import main; main(['serve'])"
    )
    *large, count = printed(code).split()
    assert not large and int(count) < 400


def test_an_engine_imports_no_compiler_of_torchs_and_no_text() -> None:
    code = (
        "import sys; from foresay.server.engine_process.process import _import; _import()\n"
        "assert {'torch', 'foresay.server.engine.build', 'foresay.server.engine_process.loop'} <= sys.modules.keys(), "
        "'before the first frame'\n"
        "from foresay.server.engine.build import build_engine\n"
        "from foresay.server.settings.config import ServeConfig\n"
        "build_engine(ServeConfig())\n"
        "print(*sys.modules.keys() & {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'aiohttp'})"
    )
    assert printed(code).split() == []


def test_a_command_with_an_engine_of_its_own_imports_none_either() -> None:
    """Where transformers finds torch it imports the compiler, and more, with a tokenizer."""
    code = (
        "import sys; from foresay.server.cli.main import main\n"
        "assert main(['generate', '--prompt', 'Once', '--max-tokens', '2', '--json']) == 0\n"
        "print(*sys.modules.keys() & {'torch._dynamo', 'sympy', 'torch.distributed.tensor', 'aiohttp'})"
    )
    assert printed(code).splitlines()[1:] in ([], [""])


def test_a_process_that_nobody_requested_is_ended(capsys) -> None:
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err and children() <= before


def test_the_first_request_has_the_process_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Iterator[Any] = iter(("first", "second", "third"))
    monkeypatch.setattr(child, "spawn", lambda *given: next(made))
    with ahead(True) as spawn:
        assert next(made) == "second", "the first one is there already"
        assert [str(spawn()), str(spawn())] == ["first", "third"]


def test_where_none_can_be_started_it_is_tried_again_when_one_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: object) -> None:
        raise OSError("too many")

    monkeypatch.setattr(child, "spawn", refused)
    with ahead(True) as spawn, pytest.raises(OSError, match="too many"):
        spawn()


SECONDS = 180.0


def until(true: Callable[[], object]) -> None:
    """Wait until it is so."""
    end = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


COMPILES = """
import os, time
from foresay.verifier.ops.kernels.cpu import compiler
from foresay.verifier.ops.kernels.cpu.jit import Processor
Processor.here().compiled("define void @f() {\\n ret void\\n}")
print(compiler.compiled._child._process.pid, flush=True)
time.sleep(600)
"""


def test_of_an_engine_that_is_killed_no_compiler_stays() -> None:
    with subprocess.Popen([sys.executable, "-c", COMPILES], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        compiler = Path(f"/proc/{int(engine.stdout.readline())}")
        assert compiler.joinpath("comm").read_text().strip() == NAME
        engine.kill()
        until(lambda: state_of(int(compiler.name)) in "ZX")


# -- without torch -----------------------------------------------------------------------------------------------------


ASK: Any = {"model": "bundled", "messages": [{"role": "user", "content": "Tell a story."}]}
SHAPE: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


@pytest.mark.parametrize("draft", ["auto"])
async def test_a_server_that_has_answered_never_imported_it(draft, tmp_path) -> None:
    with LiveServer(tmp_path / "log", "--draft", draft, "--max-model-len", "256") as server:
        async with openai_client(server.wait_for_url()) as client:
            await client.chat.completions.create(**ASK, max_tokens=8, logprobs=True, top_logprobs=2)
            await client.chat.completions.create(**ASK, max_tokens=8, response_format=SHAPE)
            await client.completions.create(model="bundled", prompt="Once", max_tokens=8, echo=True)
            await client.responses.create(model="bundled", input="Once", max_output_tokens=8)
            found = await client.models.list()
        assert [model.id for model in found.data] == ["bundled"]
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        engine = Path(f"/proc/{server.engine_processes()[0]}/maps").read_text()
    assert "libtorch" not in maps and "libtorch" in engine


def test_what_has_to_be_fetched(tmp_path) -> None:
    assert nothing_to_fetch("none") and nothing_to_fetch("ngram,suffix")
    assert nothing_to_fetch(f"draft_model:{tmp_path},suffix") and nothing_to_fetch(str(tmp_path))
    for elsewhere in ("Qwen/Qwen3-0.6B", "eagle3:someone/head", "package.module:Class", f"suffix,{tmp_path}/missing"):
        assert not nothing_to_fetch(elsewhere)


def test_a_process_that_imported_torch_keeps_it() -> None:
    """In one process with an engine nothing is hidden from transformers."""
    code = (
        "import torch, os; from foresay.server.engine_process.child import import_tokenizers; import_tokenizers();"
        "import transformers.utils as u; assert u.is_torch_available();"
        "assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_it_tokenizers_load_and_nobody_complains() -> None:
    code = (
        "from foresay.server.engine_process.child import import_tokenizers; import_tokenizers(); import sys, os;"
        "from foresay.server.text.tokenizer import Tokenizer; from foresay.server.settings.resolved import BUNDLED;"
        "Tokenizer.load(BUNDLED / 'target').encode('fox');"
        "assert not sys.modules.keys() & {'torch', 'transformers.models.auto.tokenization_auto'} and"
        " 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "PyTorch" not in done.stdout + done.stderr


#: What tokenizer_config.json and config.json say, beside what they need.
NAMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"model_type": "qwen3"}),
    ({}, {"model_type": None}),
    ({"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
    ({"tokenizer_class": "LlamaTokenizerFast"}, {}),
    ({"tokenizer_class": None}, {}),
    ({}, {"model_type": "qwen2"}),
    ({}, {"auto_map": {"AutoConfig": "mine.Config"}}),
    ({"auto_map": {"AutoTokenizer": [None, "mine.Tokenizer"]}}, {}),
]


@pytest.mark.parametrize(("about", "model"), NAMED)
def test_a_tokenizer_is_read_as_auto_tokenizer_reads_it(about, model, tmp_path) -> None:
    for name, changes in (("tokenizer_config.json", about), ("config.json", model)):
        values = json.loads((BUNDLED / "target" / name).read_text())
        (tmp_path / name).write_text(json.dumps(values | changes))
    shutil.copy(BUNDLED / "target" / "tokenizer.json", tmp_path)
    direct = NAMED.index((about, model)) < 4
    assert loader_of(tmp_path) == ("PreTrainedTokenizerFast" if direct else "AutoTokenizer")
    if direct:
        one, other = (
            getattr(transformers, name).from_pretrained(tmp_path, local_files_only=True)
            for name in (loader_of(tmp_path), "AutoTokenizer")
        )
        assert type(one) is type(other) and one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
        assert (one.chat_template, one.special_tokens_map) == (other.chat_template, other.special_tokens_map)
    (tmp_path / "config.json").write_text("{")
    assert loader_of(tmp_path) == "AutoTokenizer"
