"""The suffix drafter's memory on disk: written at the end and now and then, read at the start, refused if damaged."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import stat
import urllib.request
from pathlib import Path
from unittest.mock import Mock

import pytest

from foresay.drafters.suffix.contexts import History
from foresay.server.engine import history as draft_history
from foresay.server.engine.history import MAGIC, HistoryWriter, read, write
from foresay.server.engine_process.local import Engine
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.load import check
from foresay.spec.errors import ConfigurationError
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.server.live import LiveServer

VOCAB = 1000


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "drafts")


def filled(seed: int = 1) -> History:
    rng, history = random.Random(seed), History(2000, 5000)
    for _ in range(40):
        history.add(rng.choice(["", "key one", "key two"]), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 300))])
    return history


def save(file: str, history: History, rest: float = 0.0) -> None:
    write(file, history.texts(), history.key, VOCAB, rest)


def engine(file: str) -> Engine:
    return Engine("bundled", "suffix", draft_tokens=8, max_model_len=256, dtype="float32", draft_history=file)


def test_a_restart_forgets_nothing(file) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    with engine(file) as first:
        before = first.generate("Once upon a time", params)
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    with engine(file) as second:
        after = second.generate("Once upon a time", params)
    assert after.token_ids == before.token_ids
    assert before.statistics is not None and after.statistics is not None
    assert before.statistics.accepted < 20 < 45 < after.statistics.accepted


def test_private_answers_are_not_written(file) -> None:
    with engine(file) as running:
        prompt = running.tokenizer.encode("Once upon a time")
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)
        for id in ("first", "second"):
            running.run(Request(id=id, prompt=prompt, params=params, private=id == "second")).result()
    assert len(read(file, running.info.vocab_size)) == len(prompt) + 9 + 1


def test_what_is_read_is_what_was_written(file) -> None:
    history = filled()
    save(file, history)
    found = read(file, VOCAB)
    assert (found.texts(), found.key, len(found)) == (history.texts(), history.key, len(history))
    assert all(text.behind == 0 for _, texts in history.texts() for text in found.of("key one").texts)
    assert found.behind == []


def test_salts_stay_apart_and_no_key_is_written(file) -> None:
    history = History()
    history.add("key-one:", [1, 2, 3, 4])
    save(file, history)
    assert b"key-one" not in Path(file).read_bytes()
    found = read(file, VOCAB)
    assert found.of("key-one:").texts[0].matches([1, 2]) != []
    assert found.of("").texts == found.of("key-two:").texts == []


def test_a_file_that_is_not_there_yet_is_an_empty_history(file) -> None:
    assert len(read(file, VOCAB)) == 0


def broken(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: b"", "is not a draft history; name another file"),
        (lambda data: b'{"event": "begin"}\n' * 9, "is not a draft history; name another file"),
        (lambda data: data[:-1], "is damaged"),
        (lambda data: data[: len(MAGIC)], "is damaged"),
        (lambda data: broken(data, len(MAGIC) + 3), "is damaged"),
        (lambda data: broken(data, len(data) // 2), "is damaged"),
        (lambda data: MAGIC + draft_history._digest(b"\xc1") + b"\xc1", "move it away to start afresh"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(file, spoil, said) -> None:
    save(file, filled())
    Path(file).write_bytes(spoil(Path(file).read_bytes()))
    with pytest.raises(ConfigurationError, match=said) as refused:
        read(file, VOCAB)
    assert f"--draft-history {file}" in str(refused.value)


def test_a_file_of_another_target_is_refused(file) -> None:
    save(file, filled())
    with pytest.raises(ConfigurationError, match="was written with a target of 1000 tokens, this one has 999"):
        read(file, VOCAB - 1)


def test_tokens_that_are_none_are_refused(file) -> None:
    history = History()
    history.add("", [VOCAB])
    save(file, history)
    with pytest.raises(ConfigurationError, match="holds tokens outside the vocabulary of 1000"):
        read(file, VOCAB)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="no file can be written in"):
        read(str(tmp_path / "nowhere" / "drafts"), VOCAB)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(str(tmp_path), VOCAB)


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch) -> None:
    save(file, filled(1))
    old = Path(file).read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        save(file, filled(2))
    assert Path(file).read_bytes() == old
    assert os.listdir(Path(file).parent) == ["drafts"]


def test_it_is_written_while_the_engine_runs(file) -> None:
    with engine(file) as running:
        writer = running._history
        assert isinstance(writer, HistoryWriter)
        writer._every = 0.0
        running.generate("Once upon a time", max_tokens=8)
        assert writer._thread is not None
        writer._thread.join()
        seen = len(read(file, running.info.vocab_size))
        running.generate("There was", max_tokens=8)
    assert 0 < seen < len(read(file, running.info.vocab_size))


def test_what_another_process_is_writing_is_written_later(file, caplog) -> None:
    with engine(file) as running, open(f"{file}.part", "wb") as other, caplog.at_level(logging.WARNING):
        fcntl.flock(other, fcntl.LOCK_EX)
        running.generate("Once upon a time", max_tokens=8)
        for writer in (running._history, running._history):
            assert writer is not None
            writer.close()
        assert caplog.text.count("another process is writing it") == 1 and not os.path.exists(file)
    assert len(read(file, running.info.vocab_size)) > 0


@pytest.mark.parametrize("mode", [0o602, 0o620, stat.S_IFIFO | 0o600, 0])
def test_a_file_that_others_made_to_be_written_is_refused(file, monkeypatch, mode: int) -> None:
    os.mknod(f"{file}.part", mode or 0o600)
    os.chmod(f"{file}.part", stat.S_IMODE(mode or 0o600))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + (mode == 0))
    with pytest.raises(OSError, match="other users may write to"):
        save(file, filled())
    assert os.stat(f"{file}.part").st_size == 0 and not os.path.exists(file)


def test_a_folder_that_is_gone_does_not_stop_the_engine(tmp_path, caplog) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with caplog.at_level(logging.WARNING), engine(str(folder / "drafts")) as running:
        running.generate("Once upon a time", max_tokens=8)
        folder.rmdir()
    assert "cannot be written" in caplog.text


def asked(url: str, key: str) -> tuple[str, int]:
    """What the server writes for this key, and how many drafts were accepted in it."""
    body = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 60, "seed": 5, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]


def test_a_server_drafts_from_the_answers_of_the_same_key_alone(tmp_path, file) -> None:
    keys = ("a-long-key-of-the-first", "a-long-key-of-the-second")
    flags = ["--draft-history", file, "--draft", "suffix", "--draft-tokens", "8"]
    flags += ["--threads", "1", "--kv-tokens", "2048"]
    flags += [part for key in keys for part in ("--api-key", key)]
    with LiveServer(tmp_path / "first.log", *flags) as server:
        url = server.wait_for_url()
        (text, before), (again, repeated), (others, apart) = (asked(url, keys[n]) for n in (0, 0, 1))
        server.terminate()
        assert server.process.wait(180) == 0, server.output
    assert text == again == others
    assert before == apart < 20 < 45 < repeated
    data = Path(file).read_bytes()
    assert not any(key.encode() in data for key in keys)
    with LiveServer(tmp_path / "second.log", *flags) as server:
        assert asked(server.wait_for_url(), keys[0]) == (text, repeated)


@pytest.mark.parametrize("draft", ["ngram", "none", "bundled,ngram"])
def test_it_goes_with_the_suffix_drafter_alone(draft) -> None:
    with pytest.raises(ConfigurationError, match=f"draft is {draft}: set --draft suffix, or leave --draft-history out"):
        check(EngineConfig(draft=draft, draft_history="file"))
    for with_it in ("suffix", "auto", "ngram,suffix"):
        check(EngineConfig(draft=with_it, draft_history="file"))
