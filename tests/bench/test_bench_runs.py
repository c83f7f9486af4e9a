"""The benchmarks run: ways of decoding are built, compared, checked for equal tokens and reported."""

from __future__ import annotations

import json
import random
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench import busy, drive, edits, floor, forced, http, record, report, summary
from bench.decode import compare
from bench.drive import FROM_DIRECTORY, BadMode, Options, Run, engine_config, mode_of
from bench.overhead import added, metered_models
from bench.summary import Sample, TokensDiffer, check_same
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.spec.trace import Statistics
from foresay.verifier.ops.kernels.cpu import threads

MODES = ("none", "ngram:3", "draft_model:2", "draft_model:3,2")


def write_model(path: Path, layers: int) -> str:
    torch.manual_seed(layers)
    shape: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": layers, "intermediate_size": 48}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=256)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    path = tmp_path_factory.mktemp("models")
    return Options(write_model(path / "target", 2), write_model(path / "draft", 1), "float32", kv_tokens=256)


def finished_run(tokens: list[int], accepted: list[int], drafted: list[int]) -> Run:
    statistics = Statistics(
        prompt_tokens=1, cached_tokens=0, completion_tokens=len(tokens), steps=len(accepted), drafted=sum(drafted),
        accepted=sum(accepted), drafted_per_depth=[2, 1], accepted_per_depth=[2, 0], acceptance_histogram=[1, 2],
        num_spec_tokens=2, discarded=0, preemptions=0, seconds={"propose": 1.0, "forward": 3.0, "prefill": 9.0},
        time_to_first_token=0.1, decode_seconds=2.0, decode_tokens_per_second=len(tokens) / 2.0,
        per_step_drafted=drafted, per_step_accepted=accepted,
    )  # fmt: skip
    return Run(tokens, 4.0, [0.1, 0.2], statistics)


def test_modes() -> None:
    options = Options("T", "D")
    assert engine_config("none", options).draft == "none"
    assert (engine_config("ngram:7", options).draft, engine_config("ngram:7", options).draft_tokens) == ("ngram", 7)
    model = engine_config("draft_model:3", options)
    assert (model.draft, model.draft_tokens) == ("draft_model:D", 3)
    assert engine_config(mode_of("draft:3"), options) == model, "as old records call it"
    assert mode_of("prediction+draft:3") == "prediction+draft_model:3"
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


@pytest.mark.parametrize("name", FROM_DIRECTORY)
def test_some_modes_need_a_directory(name: str) -> None:
    with pytest.raises(BadMode, match=f"--{FROM_DIRECTORY[name]} DIR"):
        engine_config(f"{name}:4", Options("T"))


def test_different_tokens_are_reported() -> None:
    same, other = finished_run([5, 6, 7], [0, 1], [0, 2]), finished_run([5, 9, 7], [0, 1], [0, 2])
    check_same([Sample("none", 0.0, "p", 0, same), Sample("ngram", 1.0, "p", 0, other)])
    with pytest.raises(TokensDiffer, match="ngram parts from none at output token 1"):
        check_same([Sample("none", 0.0, "p", 0, same), Sample("ngram", 0.0, "p", 0, other)])


def test_summary() -> None:
    runs = [Sample("draft_model:2", 0.0, "p", n, finished_run([5, 6, 7, 8, 9], [0, 1, 1], [0, 2, 1])) for n in range(2)]
    got = summary.summarise(runs)
    assert got["tokens_per_step"] == pytest.approx(5 / 3)
    assert got["draft_share"] == pytest.approx(0.25)
    assert got["phases_ms"]["forward"] == pytest.approx(1500.0)  # over the two steps after the prompt's
    assert got["acceptance_per_depth"] == [1.0, 0.0]
    assert got["reached_per_depth"] == [1.0, 0.0]


def test_real_engines_side_by_side(options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = drive.build_all(MODES, options)
    assert len({id(drive.target_of(engine).decoder) for engine in engines.values()}) == 1
    samples = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
        for mode, engine in engines.items():
            run = drive.run(engine, drive.request([1, 2, 3, 1, 2], params))
            assert len(run.tokens) == 24
            samples.append(Sample(mode, temperature, "p", 0, run))
    check_same(samples)
    compared = compare([s for s in samples if s.temperature == 0.0], MODES)
    assert compared["draft_model:2"]["vs_none"].ratio > 0
    assert sum(compared["draft_model:3,2"]["drafted_per_depth"]) > 0
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    described = record.models(engines["none"], options.target, options.draft)
    record.finish("decode", {**described, "temperature": {"0": compared}, "floor": None})
    assert "| draft_model:3,2 |" in report.report(tmp_path)
    assert str(tmp_path) not in report.report(tmp_path)


def test_forced_draws_follow_the_trace(options: Options) -> None:
    engine = drive.build("ngram:3", options)
    output = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=len(output), ignore_eos=True)
    run = drive.run(engine, drive.request([4, 5, 6], params, output))
    assert run.tokens == output
    assert run.statistics.accepted > 0


def test_overhead_leaves_the_models_out(options: Options) -> None:
    engine = drive.build("none", options)
    asked = drive.request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    with metered_models() as meter:
        steps = added(engine, asked, meter)
    assert len(steps) == 5
    assert all(own > 0 and models > 0 for own, models in steps)


def test_traces(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"prompt_token_ids": [1], "output_token_ids": [2, 3]}) + "\n")
    assert forced.read_trace(trace) == [forced.Recorded("t-1", [1], [2, 3])]
    trace.write_text('{"prompt_token_ids": [1]}\n')
    with pytest.raises(forced.BadTrace, match="line 1"):
        forced.read_trace(trace)


def test_answers_are_parsed() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    events = [b'data: {"choices":[{"text":"ab"}]}\n\n', b'data: {"choices":[{"text":"c"}]}\n\ndata: [DONE]\n\n']
    body = b"".join(b"%x\r\n%b\r\n" % (len(e), e) for e in events) + b"0\r\n\r\n"
    assert http.parse(head + body, streamed=True) == ("abc", 2)
    whole = b'HTTP/1.1 200 OK\r\n\r\n{"choices":[{"text":"abc"}]}'
    assert http.parse(whole, streamed=False) == ("abc", 1)
    with pytest.raises(http.ServerFailed, match="busy"):
        http.parse(b"HTTP/1.1 503 Unavailable\r\n\r\nbusy", streamed=False)


def test_modes_for_requests_with_predictions() -> None:
    options = Options("T", "D")
    assert engine_config("prediction", options).draft == "none"
    below = engine_config("prediction+suffix:8", options)
    assert (below.draft, below.draft_tokens) == ("suffix", 8)
    with pytest.raises(BadMode, match="prediction"):
        engine_config("prediction:4", options)


def test_edits_of_texts_are_forced_and_predicted(options: Options) -> None:
    rng = random.Random(2)
    text = [rng.randrange(2, 64) for _ in range(60)]
    recorded = [forced.Recorded("t", text[:20], text, [*text[:30], 5, *text[30:]])]
    engines = drive.build_all(["none", "prediction"], options)
    args = Namespace(seed=1, rounds=1, temperature=1.0)
    samples = {sample.mode: sample.run for sample in forced.interleave(engines, recorded, args)}
    assert samples["prediction"].tokens == samples["none"].tokens == text
    assert samples["prediction"].statistics.steps < samples["none"].statistics.steps / 4


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.15])
def test_as_many_words_are_edited_as_said(rate: float) -> None:
    text = "\n".join(" ".join(f"{line}.{word}" for word in range(12)) for line in range(60))
    edit = edits.edited(text, random.Random(1), rate)
    kept = sum(word in set(edit.split()) for word in text.split()) / 720
    assert kept == pytest.approx(1 - rate * 2 / 3 - rate / 5 * 2 / 3, abs=0.06)
    assert (edit == text) == (rate == 0)


def test_floors_are_probed_by_as_many_threads_as_kernels_have(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is left one thread, which does not read memory as fast as all; prompts are measured through the engine."""
    engine, used = drive.build("none", options), []

    def timed(call: Callable[[], object]) -> float:
        used.append((isinstance(call, floor.LinearsAlone | floor.BareForward), torch.get_num_threads()))
        return 0.5

    monkeypatch.setattr(floor, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(floor, "timed", timed)
    monkeypatch.setattr(threads, "wanted", lambda: 2)
    found = floor.report(engine, [1, 3], 1)
    assert set(found["rows"]) == {"1", "3"} and found["rows"]["3"]["over_first"] == 1.0
    assert found["rows"]["1"]["step_multiple"] == pytest.approx((1 << 20) / found["bytes_per_step"])
    assert set(used) == {(False, 2), (True, 1)}
    monkeypatch.undo()
    rates = floor.prompt_rates(engine, [20, 40], 2)
    assert {length: rate.size for length, rate in rates.items()} == {"20": 2, "40": 2}
    assert all(rate.median > 0 for rate in rates.values())


def test_what_decoding_keeps_beside_others(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, quiet and beside a process that wants a core; and others are gone afterwards."""
    seen: list[tuple[bool, int]] = []
    beside: list[subprocess.Popen[bytes]] = []

    def speed(engine: Engine, prompt: list[int], tokens: int, seed: int) -> float:
        seen.append((team._gives_way, sum(process.poll() is None for process in beside)))
        return 100.0 / (1 + seen[-1][1]) * (1.5 if seen[-1][0] else 1.0)

    class Other(subprocess.Popen):
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            beside.append(self)

    team = threads._team
    monkeypatch.setattr(busy, "speed", speed)
    monkeypatch.setattr("bench.busy.subprocess.Popen", Other)
    args = Namespace(processes=1, rounds=2, max_tokens=4, seed=0)
    result = busy.decoding(drive.build("none", options), {"a": [1, 2], "b": [3]}, args)
    assert sorted(seen) == sorted([(way, count) for way in (False, True) for count in (0, 1)] * 4)
    speeds = result["tokens_per_second"]
    assert isinstance(speeds, dict)
    assert [row["kept"].ratio for row in speeds.values()] == pytest.approx([0.5, 0.5])
    assert result["quiet, giving way over all threads"].ratio == pytest.approx(1.5)  # type: ignore[attr-defined]
    assert team._gives_way
    assert all(process.poll() is not None for process in beside)
