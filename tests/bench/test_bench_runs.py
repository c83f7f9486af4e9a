"""The benchmarks run: ways of decoding are built, compared, checked for equal tokens and reported."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import __main__, decode, drive, floor, record, texts
from bench.drive import BadMode, Options, Run, engine_config, mode_of
from bench.experiment import Case, Sample, Taken
from foresay.spec.trace import Statistics
from foresay.verifier.ops.kernels.cpu import threads
from tests.same_tokens.test_directories import write_tokenizer

MODES = ("none", "ngram:3", "draft_model:2", "draft_model:3,2")


def write_model(path: Path, layers: int) -> str:
    torch.manual_seed(layers)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": layers, "intermediate_size": 48}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 290}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=256)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    path = tmp_path_factory.mktemp("models")
    return Options(write_model(path / "target", 2), write_model(path / "draft", 1), "float32", kv_tokens=256)


def finished_run(tokens: list[int], accepted: list[int], drafted: list[int]) -> Run:
    statistics = Statistics(
        prompt_tokens=1, completion_tokens=len(tokens), drafted_per_depth=[2, 1], accepted_per_depth=[2, 0],
        seconds={"propose": 1.0, "forward": 3.0, "prefill": 9.0}, first=0.1, last=2.1,
        per_step_drafted=drafted, per_step_accepted=accepted,
    )  # fmt: skip
    run = Run(tokens, 4.0)
    run.statistics = statistics
    return run


def test_modes() -> None:
    options = Options("T", "D")
    assert engine_config("none", options).draft == "none"
    assert (engine_config("ngram:7", options).draft, engine_config("ngram:7", options).draft_tokens) == ("ngram", 7)
    model = engine_config("draft_model:3", options)
    assert (model.draft, model.draft_tokens) == ("draft_model:D", 3)
    assert engine_config(mode_of("draft:3"), options) == model, "as old records call it"
    assert engine_config("draft_model:3,2", options).draft_tree == "3,2"
    heads = Options("T", medusa="M", eagle3="E")
    assert engine_config("medusa:3", heads).draft == "medusa:M"
    assert (engine_config("eagle3:4,2", heads).draft, engine_config("eagle3:4,2", heads).draft_tree) == (
        "eagle3:E",
        "4,2",
    )


@pytest.mark.parametrize("mode", ["hydra", "draft_model:x", "draft_model:-1"])
def test_bad_modes(mode: str) -> None:
    with pytest.raises(BadMode, match=mode):
        engine_config(mode, Options("T", "D"))


def test_summary() -> None:
    run = finished_run([5, 6, 7, 8, 9], [0, 1, 1], [0, 2, 1])
    got = decode.summary([Taken("draft_model:2", Case("", "p"), n, Sample({}, detail=run)) for n in range(2)])
    assert got["tokens_per_step"].ratio == pytest.approx(5 / 3)
    assert got["nodes_per_step"] == pytest.approx(3 / 2)
    assert got["draft_share"] == pytest.approx(0.25)
    assert got["ms of a step"]["forward"] == pytest.approx(1500.0)  # over the two steps after the prompt's
    assert got["counts by depth"] == {"drafted": [4, 2], "accepted": [4, 0]}
    assert got["accepted_cumulative"] == got["accepted_given_parent"] == [1.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.15])
def test_as_many_words_are_edited_as_requested(rate: float) -> None:
    text = "\n".join(" ".join(f"{line}.{word}" for word in range(12)) for line in range(60))
    edit = texts.edited(text, random.Random(1), rate)
    kept = sum(word in set(edit.split()) for word in text.split()) / 720
    assert kept == pytest.approx(1 - rate * 2 / 3 - rate / 5 * 2 / 3, abs=0.06)
    assert (edit == text) == (rate == 0)


def test_engines_side_by_side_share_weights_and_are_recorded(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = drive.build_all(MODES, options)
    assert len({id(drive.target_of(engine).decoder) for engine in engines.values()}) == 1
    write_tokenizer(Path(options.target), 290)
    (Path(options.target) / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "p.jsonl").write_text('{"text": "the quick brown fox"}\n')
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    flags = ["--target", options.target, "--draft", str(options.draft), "--dtype", "float32", "--rounds", "1"]
    flags += ["--prompts", str(tmp_path / "p.jsonl"), "--max-tokens", "12", "--floor-rows", "--modes", *MODES]
    assert __main__.main(["decode", *flags]) == 0
    entry = json.loads(next((tmp_path / "results").glob("*-decode.json")).read_text())
    assert entry["identical"] and set(entry["groups"]) == {"temperature 0", "temperature 1"}
    rows = entry["groups"]["temperature 0"]
    assert rows["draft_model:2"]["times none"]["ratio"] > 0
    assert sum(rows["draft_model:3,2"]["counts by depth"]["drafted"]) > 0
    assert str(tmp_path) not in json.dumps(entry), "folders of the machine are nobody's business"


def test_floors_are_probed_by_as_many_threads_as_kernels_have(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is left one thread, which does not read memory as fast as all; prompts are measured through the engine."""
    engine, used = drive.build("none", options), []

    def timed(call: Callable[[], object]) -> float:
        used.append(torch.get_num_threads())
        return 0.5

    monkeypatch.setattr(floor, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(floor, "timed", timed)
    monkeypatch.setattr(threads, "num_threads", lambda: 2)
    found = floor.report(engine, [1, 3], 1)
    assert set(found["groups"]) == {"1 rows", "3 rows"} and found["over_first"]["3 rows"] == 1.0
    step = found["groups"]["3 rows"]["step"]
    assert step["times linears"].ratio == pytest.approx(1.0)
    assert step["times reading"].ratio == pytest.approx((1 << 20) / found["bytes_per_step"])
    assert sorted(set(used)) == [1, 2] and used.count(2) == 3 * used.count(1) / 2, "three reads to a step and linears"
    monkeypatch.undo()
    rates = floor.prompt_rates(engine, [20, 40], 2)
    assert {length: of["prompt"]["tokens_per_second"].size for length, of in rates.items()} == {
        "20 tokens": 2,
        "40 tokens": 2,
    }


def test_steps_of_targets_of_other_dtypes_are_measured_too(options: Options) -> None:
    assert floor.kept("quantize=int4,activations=int8") == {"quantize": "int4", "activations": "int8"}
    plain, other = drive.build("none", options), drive.build("none", replace(options, kv_dtype="int8"))
    rows = floor.report(plain, [1], 1, 16, {"step, kv_dtype=int8": other})["groups"]["1 rows"]
    assert list(rows) == ["reading", "linears", "step", "step, kv_dtype=int8"]
    assert rows["step, kv_dtype=int8"]["MB"] < rows["step"]["MB"] and "times step" in rows["step, kv_dtype=int8"]
