"""``python -m bench.gpu`` where there is no GPU: its clock, its floors, its models, and a rehearsal of every part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench import report
from bench.gpu import bars, heads, kernel_tests, kernels, parts, replay, settings, shapes, speed
from bench.gpu.__main__ import arguments, main
from bench.gpu.case import Case
from bench.gpu.compiling import compile_all
from bench.gpu.device import Device
from bench.gpu.drafting import Ground
from bench.gpu.engines import Bench, answers, ask
from bench.gpu.models import BUNDLED, inflated, paged
from bench.gpu.probe import BLOCK, read_stream
from bench.gpu.session import Broken, Clock, Session
from bench.gpu.shapes import (
    EagleShape,
    ModelShape,
    draft_model_bytes,
    eagle_bytes,
    kv_bytes_per_token,
    step_bytes,
    weight_bytes,
)
from foresay.drafters.proposer import Drafts
from foresay.kvpaging import PagePool, PageTable
from foresay.spec.protocols import Rows
from foresay.spec.sampling import SamplingParams
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.step import SpeculativeStep
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import load
from tests.kernels.compiling import CAPABILITIES, compile_kernel

ROOT = Path(__file__).resolve().parents[2]
SOURCE = BUNDLED / "target"
TINY = settings.tiny()


@pytest.fixture(scope="module")
def device() -> Device:
    torch.set_grad_enabled(False)
    return Device("cpu")


@pytest.fixture(scope="module")
def bench(device: Device) -> Bench:
    return Bench(device, shapes.TINY, shapes.TINY_DRAFT, TINY.eagle, 512, 600)


def test_the_clock_leaves_out_what_does_not_fit_and_says_so() -> None:
    now = [100.0]
    clock = Clock(10.0, now=lambda: now[0])
    assert clock.fits("a short one", 9.0)
    now[0] += 4.0
    assert (clock.spent, clock.left) == (4.0, 6.0)
    assert not clock.fits("a long one", 7.0)
    part = clock.slice(60.0)
    assert part.left == 6.0, "no longer than the whole"
    now[0] += 7.0
    assert not part.fits("another", 0.1) and clock.left == 0.0
    assert clock.skipped == ["a long one", "another"]


def test_a_run_without_time_runs_nothing_and_names_everything(device) -> None:
    now = iter(range(1000))
    session = Session(device, settings.full(), Clock(0.5, now=lambda: float(next(now))))
    parts.run_all(session, arguments([]))
    assert {"probe", "compile and test", "steps Llama-3.1-8B", "steps Qwen3-8B"} <= set(session.clock.skipped)
    assert session.found == {} and session.failures == []


def test_a_part_that_fails_is_noted_and_the_next_one_runs(device, capsys) -> None:
    session = Session(device, TINY, Clock(60.0))
    session.part("broken", 0.0, lambda: [][1])
    session.part("sound", 0.0, lambda: session.found.update(done=True))
    assert session.found["done"] and session.failures == ["broken: IndexError: list index out of range"]
    assert set(session.found["seconds"]) == {"broken", "sound"}


def config_of(shape: ModelShape) -> ModelConfig:
    return shape.config(ModelConfig.from_directory(SOURCE))


def test_floors_by_hand() -> None:
    """Llama-3.1-8B: a layer reads 4096 x (6144 + 4096 + 3 * 14336) numbers, the head 4096 x 128256."""
    large = config_of(shapes.LLAMA_8B)
    assert weight_bytes(large) == 2 * (32 * 4096 * (6144 + 4096 + 43_008) + 4096 * 128_256) == 15_009_316_864
    assert kv_bytes_per_token(large) == 128 * 1024
    assert step_bytes(large, 32_768) == 15_009_316_864 + (4 << 30)
    assert weight_bytes(config_of(shapes.LLAMA_1B)) == pytest.approx(2.47e9, rel=1e-3)
    assert weight_bytes(config_of(shapes.QWEN_8B)) == pytest.approx(15.14e9, rel=1e-3)
    head = settings.full().eagle
    assert 2 * head.pass_weights == pytest.approx(0.749e9, rel=1e-3)
    assert 2 * head.step_weights == pytest.approx(0.1007e9, rel=1e-3)
    assert eagle_bytes(head, 5, 1024) == 2 * (head.step_weights + 5 * (head.pass_weights + 2 * 8 * 128 * 1024))
    assert draft_model_bytes(large, 3, 0) == 3 * weight_bytes(large)


def test_shapes_are_the_published_ones() -> None:
    """Parameters, the embedding once where it is the head too."""
    counted = {
        shape.name: weight_bytes(config_of(shape)) // 2 + shape.untied * shape.vocab * shape.sizes.hidden
        for shape in (shapes.LLAMA_1B, shapes.LLAMA_8B, shapes.QWEN_8B)
    }
    assert counted["Llama-3.2-1B"] == pytest.approx(1.236e9, rel=2e-3)
    assert counted["Llama-3.1-8B"] == pytest.approx(8.030e9, rel=2e-3)
    assert counted["Qwen3-8B"] == pytest.approx(8.191e9, rel=2e-3)


def logits(decoder: Decoder, device: Device, tokens: Tensor) -> Tensor:
    pool = PagePool(8, 16)
    table = PageTable(pool)
    table.reserve(len(tokens))
    return paged(pool, decoder, device).run([Rows(table, tokens, 0)]).logits


@pytest.mark.parametrize("shape", [shapes.TINY, shapes.TINY_TIED, shapes.TINY_QK], ids=lambda shape: shape.name)
def test_a_model_made_on_the_device_says_what_the_bundled_one_says(shape, device) -> None:
    config = ModelConfig.from_directory(SOURCE)
    tokens = torch.randint(5, config.vocab_size, (60,), generator=torch.Generator().manual_seed(3))
    small = Decoder(config, load(SOURCE, config, torch.float32), 1024)
    _, large = inflated(device, shape, SOURCE, 1024)
    wanted, found = logits(small, device, tokens), logits(large, device, tokens)
    assert found.shape == (60, shape.vocab) and wanted.std() > 1.0
    assert (found[:, : config.vocab_size] - wanted).abs().max() < 1e-3
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert found.softmax(-1)[:, config.vocab_size :].sum(-1).max() < 1e-6


@pytest.mark.parametrize(("name", "least"), [("draft_model", 1.5), ("medusa", 1.2), ("eagle3", 1.5)])
def test_embedded_drafters_still_guess(name, least, bench) -> None:
    text = speed.prompts(SOURCE, 1)[0]
    asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    pages = bench.pool.pages_for(200)
    plain = answers(bench.engine("none", TreeShape(), False, pages), [ask(text, asked)])[0]
    drafted = answers(bench.engine(name, TreeShape.chain(4), True, pages), [ask(text, asked)])[0]
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) / drafted.statistics.steps > least


@pytest.mark.parametrize(("tau", "levels"), [(4.65, 5), (6.13, 7), (1.0, 3), (4.0, 3)])
def test_a_trace_has_the_mean_it_is_made_for(tau, levels) -> None:
    found = replay.trace(tau, levels, 100)
    assert 1 + sum(found) / 100 == pytest.approx(tau)
    assert min(found) >= 0 and max(found) <= levels
    with pytest.raises(ValueError, match="gives 1 to 4 tokens a step"):
        replay.alpha_of(4.5, 3)


def test_replayed_steps_accept_what_the_trace_says(bench) -> None:
    drafter = bench.drafter("random")
    proposer = Drafts(drafter, TreeShape.chain(5), 1, bench.target.vocab_size)
    wanted = [3, 0, 5, 1, 2]
    ground = Ground(bench.target, proposer, 48, len(wanted))
    replayed = replay.Replayed(wanted, bench.device.torch)
    step = SpeculativeStep(bench.target, proposer, ground.state, replayed)
    step()
    ground.reset()
    replayed.rewind()
    found = []
    for _ in wanted:
        step()
        found.append(int(step.out[0, 0]) - 1)
    assert found == wanted


def test_a_head_of_a_published_shape_has_its_bytes(device, bench) -> None:
    shape = EagleShape(288, 4, 2, 64, 400, 500)
    head = heads.random_eagle(device, bench.target.decoder, shape)
    config, weights = head.config, head.layer
    assert (config.draft_vocab, weights.hidden_size, weights.intermediate_size) == (500, 288, 400)
    assert shape.pass_weights == 288 * 2 * (4 + 4) * 64 + 256 * 288 + 3 * 288 * 400 + 288 * 500


def test_a_wrong_kernel_is_caught(device) -> None:
    inputs = (torch.randn(4, 8), torch.randn(16, 8))
    nan = Case("nan", lambda: inputs, lambda x, w: (x @ w.T).fill_(torch.nan), lambda x, w: x @ w.T, 1)
    off = Case("off", lambda: inputs, lambda x, w: (x @ w.T).roll(1), lambda x, w: x @ w.T, 1)
    right = Case("right", lambda: inputs, lambda x, w: x @ w.T, lambda x, w: x.double() @ w.double().T, 1)
    assert [kernels.check(device, case)[1] for case in (nan, off, right)] == [False, False, True]
    tokens = Case("tokens", lambda: (), lambda: torch.tensor([1, 2]), lambda: torch.tensor([1, 3]), 1, limit=0.02)
    assert kernels.check(device, tokens) == (0.5, False)


def test_bars() -> None:
    found = bars.verdicts({"plain_step_over_floor": 1.10, "host_gap_us_p50": 9.0, "p99_over_p50": 1.2})
    met = {verdict.bar.key: verdict.met for verdict in found}
    assert len(met) == len(bars.BARS) and met["verify_64_over_1"] == "not measured"
    assert (met["plain_step_over_floor"], met["host_gap_us_p50"], met["p99_over_p50"]) == ("yes", "goal", "NO")
    with pytest.raises(KeyError, match="speed"):
        bars.verdicts({"speed": 1.0})


def test_what_pytest_says_is_understood() -> None:
    said = "FAILED tests/kernels/on_device/test_move.py::test_x[1] - assert\n1 failed, 27 passed, 2 skipped in 3.26s\n"
    found = kernel_tests.read(said, ended=True)
    assert (found.passed, found.failed, found.skipped, found.good) == (27, 1, 2, False)
    assert found.failures == ["tests/kernels/on_device/test_move.py::test_x[1]"]
    assert kernel_tests.read("3 passed in 1s", ended=True).good
    assert not kernel_tests.read("3 passed", ended=False).good
    assert not kernel_tests.read("no tests ran", ended=True).good


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_probe_compiles(capability, tmp_path) -> None:
    types = {"data": "*i32", "sums": "*i32", "count": "i32"}
    made = compile_kernel(read_stream, types, {"BLOCK": BLOCK}, tmp_path, capability, warps=8)
    assert made.stack == 0 and "ld.global.v4" in made.ptx, "loads of 16 bytes, nothing spilled"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "needs an NVIDIA GPU" in said.err and "--device cpu --tiny" in said.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--device", "cpu"], "--device cpu takes --tiny"), (["--limit", "0"], "--limit must be above 0")],
)
def test_flags_that_make_no_sense(flags, says, capsys) -> None:
    with pytest.raises(SystemExit):
        arguments(flags)
    assert says in capsys.readouterr().err


def test_the_half_hour_rehearsed(tmp_path) -> None:
    """Every part, by the script that a GPU will see; what was found is there after each of them."""
    state, out = tmp_path / "state", tmp_path / "out"
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(out)}
    command = ["bash", str(ROOT / "bench/gpu/half_hour.sh"), "--rehearse", str(state), "400"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *_, line, last = done.stdout.splitlines()
    entry = json.loads(line)
    assert last == "done" and sorted(path.name for path in out.iterdir()) == ["gpu.expected.txt", "gpu.json", "gpu.log"]
    assert entry["bench"] == "gpu" and entry["rehearsal"] and entry["failures"] == [] and entry["left_out"] == []
    assert entry["command"].startswith("python -m bench.gpu --resume")
    parts_of = ("bandwidth", "compile_seconds", "tests", "steps", "draft_loops", "whole_steps_synthetic_acceptance")
    others = ("same_tokens", "split", "engine", "kernels", "library", "steadiness", "temperature", "gaps_us", "prefill")
    for part in (*parts_of, *others, "bits", "generate", "sweep"):
        assert entry[part], part
    assert set(entry["steps"]) == {model.name for model in TINY.models} == set(entry["kernels"])
    measured = [key for key, bar in entry["bars"].items() if bar["met"] == "rehearsal"]
    assert set(measured) == {bar.key for bar in bars.BARS} - {"host_launches"}, "the profiler counts those on a GPU"
    assert {"gpu", "triton", "torch"} <= set(entry["gpu"]) | set(entry["machine"])
    kept = json.loads((state / "gpu.json").read_text())
    assert kept["found"]["bits"] == entry["bits"] and len(kept["done"]) == len(entry["seconds"])
    (tmp_path / "20260101-000000-gpu.json").write_text(line)
    assert "| tiny, 4 rows at 96 |" in report.report(tmp_path)


def test_a_run_goes_on_where_it_was_cut_off(device, tmp_path) -> None:
    def session() -> Session:
        made = Session(device, TINY, Clock(60.0))
        made.resume(tmp_path / "gpu.json")
        return made

    def dies() -> None:
        raise KeyboardInterrupt

    first = session()
    first.part("sound", 0.0, lambda: first.found.update(kept=(1, 2)))
    first.part("broken", 0.0, lambda: [][1])
    with pytest.raises(KeyboardInterrupt):
        first.part("deadly", 0.0, dies)
    second = session()
    second.part("sound", 0.0, dies)
    second.part("broken", 0.0, dies)
    assert second.found["kept"] == [1, 2] and second.failures == ["broken: IndexError: list index out of range"]
    with pytest.raises(KeyboardInterrupt):
        second.part("deadly", 0.0, dies)
    third = session()
    third.part("deadly", 0.0, dies)
    assert third.failures[1:] == ["deadly: the process died"]


def test_a_part_of_which_something_was_left_out_is_run_again(device, tmp_path) -> None:
    kept = Session(device, TINY, Clock(60.0), kept=tmp_path / "gpu.json")
    kept.part("long", 0.0, lambda: kept.expect(kept.clock.fits("its end", 1000.0), "its end"))
    assert kept.done == [] and kept.failures == []
    kept.part("long", 0.0, lambda: None)
    assert kept.done == ["long"]


def test_what_breaks_the_gpu_ends_the_process(device, tmp_path) -> None:
    session = Session(device, TINY, Clock(60.0), kept=tmp_path / "gpu.json")

    def faults() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(Broken):
        session.part("bad", 0.0, faults)
    again = Session(device, TINY, Clock(60.0))
    again.resume(tmp_path / "gpu.json")
    assert again.done == ["bad"] and len(again.failures) == 1
    again.device = SimpleNamespace(name="another")  # type: ignore[assignment]
    with pytest.raises(ValueError, match="it is of another GPU"):
        again.resume(tmp_path / "gpu.json")


def test_what_was_carried_along_is_found_by_kernel_tests(device, tmp_path, monkeypatch) -> None:
    (tmp_path / "carried.py").write_text("")
    (tmp_path / "test_it.py").write_text("import carried, verifier\n\ndef test_it():\n    pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = kernel_tests.Running(device, [str(tmp_path / "test_it.py")]).finish(60.0)
    assert found.good, found.last_lines


def test_compiling_that_takes_too_long_is_stopped_and_left_out() -> None:
    assert compile_all(["--device", "cpu", "--tiny"], ["tiny"], limit=0.5) == {}
