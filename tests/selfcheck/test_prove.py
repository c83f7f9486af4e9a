"""``foresay prove``: the comparison, receipts and what differs between two, and that it can fail."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay import Engine
from foresay.drafters.training.prompts import Prompt
from foresay.server.cli.bench import prompts_of
from foresay.server.cli.main import main
from foresay.server.cli.prove import PROMPTS, cases_of, receipt_of, ways_of
from foresay.server.cli.prove import DecodingWay as Way
from foresay.server.cli.receipt import RECEIPTS, Receipt, compared, read, table, write
from foresay.server.engine.parameters import PORTABLE
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.errors import ConfigurationError
from foresay.verifier import model_runner
from foresay.verifier.ops.sample import sample_rows
from tests.selfcheck.inprocess import take_first_children

SMALL = ("--threads", "1", "--max-model-len", "512", "--kv-tokens", "4096", "--bits", "portable")
SETTINGS: dict[str, Any] = {
    "threads": 1, "bits": "portable", "max_seqs": 8, "max_model_len": 512, "kv_tokens": 4096,
}  # fmt: skip
OWN = [
    Prompt("Once upon a time there was a little girl who", "first"),
    Prompt([{"role": "user", "content": "Tell me a story."}], "second"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("bundled", "draft_model,suffix", **SETTINGS) as engine:
        yield engine


def proved(engine: Engine, own: list[Prompt] | None = None, most: int = 12) -> Receipt:
    return receipt_of(engine, cases_of(engine, OWN if own is None else own, most), ways_of(engine), most)


def test_each_case_is_decoded_in_each_way(engine: Engine) -> None:
    done: list[int] = []
    cases, ways = cases_of(engine, [], 6), ways_of(engine)
    assert [(case.name, len(case.prompts)) for case in cases] == [
        *((f"T={at}", len(PROMPTS)) for at in ("0", "0.7", "1")), ("penalties", 3), ("a schema", 3), ("tools", 3),
    ]  # fmt: skip
    assert [way.name for way in ways] == ["plain", "draft_model", "suffix", "1 at once", "3 at once", "8 at once"]
    receipt = receipt_of(engine, cases, ways, 6, done.append)
    assert done == list(range(1, 1 + 39 * len(ways)))
    assert not any(case.differs for case in receipt.cases)
    lines = list(table(receipt, engine.tokenizer.decode))
    assert sum(line.endswith("the same in 6 ways") for line in lines) == 6
    assert lines[6].endswith(receipt.sha256) and lines[-1].startswith(f"{engine.info.fingerprint}: weights ")
    assert [line.split(":")[0].strip() for line in lines[7:-1]] == [way.name for way in ways[1:]]
    assert all("accepted" in line for line in lines[7:-1]), "each drafted, and not what another way had written"
    assert receipt.cases[4].tokens != receipt.cases[1].tokens[:3], "the schema was at work"
    assert receipt_of(engine, cases, ways[:2], 6).sha256 == receipt.sha256


def test_a_broken_accept_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take_first_children(monkeypatch)
    with Engine("bundled", "draft_model", draft_tokens=3, **SETTINGS) as engine:  # drafts whether that pays or not
        receipt = proved(engine)
    case, way, found = next((case, *each) for case in receipt.cases for each in case.differs.items())
    lines = "\n".join(table(receipt, engine.tokenizer.decode))
    assert f"{way}: {case.where[found.prompt]}, output token {found.position + 1} is {found.other} " in lines
    assert "please report it" in lines
    receipt.exact, receipt.exact_reason = False, "rows differ"
    assert "does not claim to be exact: rows differ." in "\n".join(table(receipt, engine.tokenizer.decode))


def test_the_shipped_receipt_is_what_every_processor_writes(engine: Engine) -> None:
    assert engine.info.bits == PORTABLE
    shipped = read(RECEIPTS / "bundled.json")
    receipt = receipt_of(engine, cases_of(engine, [], shipped.max_tokens), [Way("plain", plain=True)], 32)
    assert shipped.identity == receipt.identity
    assert [case.tokens for case in receipt.cases] == [case.tokens for case in shipped.cases]


# -- two receipts ------------------------------------------------------------------------------------------------------


def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUNDLED / "target", tmp_path / "target"))


def differing(here: Path | str, engine: Engine) -> str:
    """What is said of a target beside the bundled one."""
    with Engine(str(here), "none", **SETTINGS) as other:
        receipt, given = proved(other), proved(engine)
    return "\n".join(compared(receipt, given, engine.tokenizer.decode))


def test_other_weights_are_named(engine: Engine, tmp_path: Path) -> None:
    """One number, and by its last bit: in the fingerprint, though perhaps in no text."""
    here = target(tmp_path)
    tensors = load_file(here / "model.safetensors")
    norm = tensors["model.norm.weight"]
    norm.view({2: torch.int16, 4: torch.int32}[norm.element_size()])[0] ^= 1
    save_file(tensors, here / "model.safetensors", {"format": "pt"})
    said = differing(here, engine)
    assert "The fingerprints differ" in said and "weights: " in said and "tokenizer: " not in said


def test_another_template_is_named_with_the_question_it_changes(engine: Engine, tmp_path: Path) -> None:
    here = target(tmp_path)
    template = here / "chat_template.jinja"
    template.write_text("Hello. " + template.read_text())
    said = differing(here, engine)
    assert "T=0, second is " in said and "other questions" in said
    assert "tokenizer: " in said and "weights: " not in said


def test_other_questions_are_no_fault(engine: Engine) -> None:
    other = proved(engine, OWN[::-1])
    said = list(compared(proved(engine), other, engine.tokenizer.decode))
    assert len(said) == 1 and "other questions" in said[0]


def test_one_changed_rounding_is_named_by_its_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the fingerprint knows has changed."""
    once = sample_rows

    def rounded(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return once(logits.bfloat16().float(), *rest)

    given = proved(engine)
    monkeypatch.setattr(model_runner, "sample_rows", rounded)
    with Engine("bundled", "none", **SETTINGS) as other:
        said = "\n".join(compared(proved(other), given, engine.tokenizer.decode))
    assert "output token" in said and said.endswith("please report it.")


def test_the_same_receipt_says_so_and_a_longer_one_what_it_has_more(engine: Engine) -> None:
    receipt = proved(engine)
    assert list(compared(receipt, receipt, engine.tokenizer.decode)) == [
        "The receipt of bundled has the same texts, token for token."
    ]
    longer = msgspec.structs.replace(
        receipt, cases=[*receipt.cases, msgspec.structs.replace(receipt.cases[0], name="x")]
    )
    longer.sha256 = "0"
    assert "it has further cases (x)" in "\n".join(compared(receipt, longer, engine.tokenizer.decode))
    receipt.cases.pop()
    shorter = msgspec.structs.replace(receipt, cases=receipt.cases[:1], sha256="0")
    assert "no such case as 'T=0.7'" in "\n".join(compared(receipt, shorter, engine.tokenizer.decode))


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_receipt_and_checks_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "receipt.json"
    prompts.write_text('{"prompt": "The king said"}\n{"messages": [{"role": "user", "content": "Hello"}]}\n')
    flags = ["prove", *SMALL, "--prompts", str(prompts)]
    assert main([*flags, "--max-tokens", "9", "--out", str(out), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Receipt) == read(out)
    assert main([*flags, "--check", str(out)]) == 0, "its answers are as long"
    assert capsys.readouterr().out.endswith("has the same texts, token for token.\n")
    assert main([*flags, "--check", str(out), "--max-tokens", "8"]) == 2
    assert "its answers have up to 9 tokens, not 8" in capsys.readouterr().err
    prompts.write_text('{"prompt": "The queen said"}\n{"prompt": "Hello"}\n')
    assert main([*flags, "--check", str(out)]) == 1
    assert "other questions" in capsys.readouterr().out


def test_the_command_fails_when_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_first_children(monkeypatch)
    assert main(["prove", *SMALL, "--draft", "bundled", "--draft-tree", "3,2,1", "--max-tokens", "10"]) == 1
    assert "please report it" in capsys.readouterr().out


def test_a_prompt_without_room_is_named_and_ours_are_left_out(engine: Engine) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^first has \d+ tokens; --max-model-len 512 and --max-tokens 512 leave"
    ):
        cases_of(engine, OWN[:1], 512)
    short = [len(case.prompts) for case in cases_of(engine, [], 500)]
    assert 0 < short[0] < len(PROMPTS)
    with pytest.raises(ConfigurationError, match=r"^--max-tokens 512: leaves no room"):
        cases_of(engine, [], 512)


def test_a_drafter_that_drafts_nothing_proves_nothing(engine: Engine) -> None:
    receipt = receipt_of(engine, cases_of(engine, OWN, 4)[:1], [Way("plain", plain=True), Way("x", drafter="x")], 4)
    assert "  x: drafted nothing, so nothing of it is proved" in list(table(receipt, engine.tokenizer.decode))


@pytest.mark.parametrize("damage", ["tokens", "case", "all"])
def test_a_damaged_receipt_is_refused(engine: Engine, tmp_path: Path, damage: str) -> None:
    receipt, file = proved(engine, most=3), tmp_path / "receipt.json"
    write(file, receipt)
    assert read(file) == receipt
    if damage == "tokens":
        receipt.cases[0].tokens[0] = [1, 2]
    elif damage == "case":
        receipt.cases[0].tokens.pop()
    else:
        receipt.cases[0].prompts[0].append(5)
    write(file, receipt)
    with pytest.raises(ConfigurationError, match=rf"^--check {file}: damaged, "):
        read(file)


def test_standard_input_is_a_file_of_prompts() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"The fox\nThe owl\n")
    os.close(writing)
    kept = os.dup(0)
    try:
        os.dup2(reading, 0)
        assert [prompt.content for prompt in prompts_of("-")] == ["The fox", "The owl"]
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(reading)


@pytest.mark.parametrize(
    ("flags", "content", "message"),
    [
        (["--prompts"], None, "cannot be read"),
        (["--prompts"], "\n\n", "holds no prompt"),
        (["--prompts"], '{"text": "x"}', 'expected {"prompt"'),
        (["--check"], None, "cannot be read"),
        (["--check"], "{}", "not a receipt of foresay prove --out"),
        (["--max-tokens", "0", "--check"], "{}", "--max-tokens: must be a whole number of at least 1"),
    ],
)
def test_what_is_of_no_use_is_refused_in_a_sentence(
    flags: list[str], content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=r"^2$"):
        sys.exit(main(["prove", *flags, str(file)]))
    error = capsys.readouterr().err
    assert error.startswith("foresay prove: ") and message in error and error.count("\n") == 1
