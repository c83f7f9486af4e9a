"""The server's process does without torch, with which it would hold 390 MB more and be ready a second later."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from foresay.server.settings.resolved import BUNDLED, nothing_to_fetch
from foresay.server.text.tokenizer import loader_of
from tests.server.live import LiveServer, openai_client

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
