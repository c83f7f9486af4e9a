from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.same_tokens.test_directories import write_tokenizer
from tests.verifier.families import make


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """An engine built by another test has switched them off."""
    with torch.enable_grad():
        yield


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of seven layers that often repeats itself, with a tokenizer."""
    directory = tmp_path_factory.mktemp("target")
    make("llama2", directory, num_hidden_layers=7, vocab_size=290)
    write_tokenizer(directory, 290)
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return directory


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("the quick brown fox\nsays the other fox\n\njumps over the lazy dog\n")
    return path
