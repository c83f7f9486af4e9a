"""Prompts: what is read, and how what cannot be is refused."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch

from foresay.drafters.training.prompts import read_prompts
from foresay.drafters.training.teacher import Teacher
from foresay.spec.errors import ConfigurationError

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl, line 2: not valid JSON"),
        ("p.jsonl", b'{"prompt": "a"}\n\n{"text": "b"}\n', r'p\.jsonl, line 3: expected {"prompt": "\.\.\."}'),
        ("p.jsonl", b"[1]\n", r"p\.jsonl, line 1: expected"),
        ("p.jsonl", b'{"prompt": "  "}\n', r"p\.jsonl, line 1: expected"),
        ("p.jsonl", b'{"messages": [{"content": "hi"}]}\n', r"p\.jsonl, line 1: expected"),
        ("p.jsonl", b'{"messages": []}\n', r"p\.jsonl, line 1: expected"),
        ("p.jsonl", b"[" * 100_000, r"p\.jsonl, line 1: not valid JSON"),
        ("p.txt", b"one\ntwo \xff\n", r"p\.txt, line 2: not UTF-8 text \(invalid start byte\)"),
        ("p.json", b"[]", r"p\.json: one JSON object per line is expected, in a file that ends in \.jsonl"),
        ("p.txt", b"\n \n", r"p\.txt: holds no prompt"),
        ("p.txt", b"", r"p\.txt: holds no prompt"),
        (".", b"", r"holds no prompt \(files end in \.txt or \.jsonl\)"),
        ("missing.txt", None, r"missing\.txt: cannot be read \(No such file or directory\)"),
    ],
)
def test_bad_prompts_are_named(tmp_path, name, content, message) -> None:
    if content is not None and name != ".":
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_prompts(tmp_path / name)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ConfigurationError, match=r"a\.txt: cannot be read \(Permission denied\)"):
        read_prompts(tmp_path)


def test_prompts_are_read_from_folders_and_chats(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"prompt": "three"}))
    (tmp_path / "notes.md").write_text("no prompt")
    found = read_prompts(tmp_path)
    assert [prompt.content for prompt in found] == ["one", "two", CHAT, "three"]
    assert found[2].where == f"{tmp_path}/b.jsonl, line 1"


def test_a_line_ends_at_a_newline_alone(tmp_path) -> None:
    """Editors of other systems write marks and returns, and texts hold what str.splitlines takes for a line's end."""
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"prompt": "one\u2028and\x85a half"}\r\n{"prompt": "two"}\r\n'.encode())
    assert [prompt.content for prompt in read_prompts(tmp_path / "a.jsonl")] == ["one\u2028and\x85a half", "two"]


TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] + 'x' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT, "line 2: is a chat, but the target has no chat template"),
        (TEMPLATE, [{"role": "system", "content": "x"}], r"line 2: the target's .* refuses .* \(no system message\)"),
        (TEMPLATE, [{"role": "user", "content": 3}], r"line 2: the target's .* \(unsupported operand"),
        (TEMPLATE, [{"role": "user"}], r"line 2: the target's chat template refuses these messages \("),
        ("{% if %}", CHAT, r"line 2: the target's chat template refuses these messages \("),
    ],
)
def test_a_chat_that_the_template_refuses(target, tmp_path, template, messages, message) -> None:
    directory = tmp_path / "target"
    shutil.copytree(target, directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"messages": messages}))
    teacher = Teacher(directory, "cpu", torch.float32)
    with pytest.raises(ConfigurationError, match=message) as caught:
        teacher.prompts(tmp_path / "p.jsonl", 20)
    assert len(str(caught.value).splitlines()) == 1
    assert f"{tmp_path}/p.jsonl" in str(caught.value)


def test_prompts_of_no_token_are_left_out(target, tmp_path, monkeypatch) -> None:
    teacher = Teacher(target, "cpu", torch.float32)
    once = teacher.tokenizer

    def sparse(text, **options):
        return {"input_ids": []} if text == "empty" else once(text, **options)

    monkeypatch.setattr(teacher, "tokenizer", sparse)
    (tmp_path / "p.txt").write_text("empty\nthe fox\n")
    assert len(teacher.prompts(tmp_path / "p.txt", 20)) == 1
    (tmp_path / "p.txt").write_text("empty\n")
    with pytest.raises(ConfigurationError, match=r"p\.txt: every prompt is empty"):
        teacher.prompts(tmp_path / "p.txt", 20)
