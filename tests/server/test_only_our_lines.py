"""What commands print is theirs: no line of a library's, such as transformers' of a wrong tokenizer, which it says of
every large vocabulary without a ``model_type``."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.server.live import LiveServer
from tests.verifier.families import make
from tests.verifier.gguf_files import all_of, convert, letters

#: As many tokens as transformers calls a large vocabulary.
LARGE = 100_001
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
#: Small, and nothing measured.
FLAGS = ("--draft", "none", "--max-model-len", "64", "--kv-disk", "off")
#: The lines of a server: stages of its start, the banner, the command to try, the end.
OURS = r" *\d+\.\d s  .*|Foresay (is ready|stopped).*|(KV cache|[a-z-]+|API) +\S.*|try it:|  curl .*"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file as those of Qwen2.5, of random numbers."""
    root = tmp_path_factory.mktemp("large")
    make("qwen2", root, vocab_size=LARGE, num_hidden_layers=1)
    tokens = letters(LARGE) | {"tokenizer.ggml.pre": "qwen2", "tokenizer.chat_template": TEMPLATE}
    tokens["tokenizer.ggml.tokens"][-3:] = ["t", "1", "i"]
    convert(root, root / "large.gguf", all_of("F16"), tokens)
    return root / "large.gguf"


def test_a_server_prints_its_start_and_its_end(file: Path, tmp_path: Path) -> None:
    with LiveServer(tmp_path / "log", str(file), *FLAGS) as server:
        server.wait_for_url()
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(60)
    foreign = [line for line in server.output.splitlines() if not re.fullmatch(OURS, line)]
    assert foreign == [] and "Foresay stopped" in server.output
