"""What an engine measured: handed on to the next one where that is of the same, and measured again where it is not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from foresay import Engine
from foresay.server.cli.main import main
from foresay.server.engine import handover
from foresay.server.engine.build import build_engine
from foresay.server.engine.calibrate import ProfileRun
from foresay.server.engine.costs import Costs, digest
from foresay.server.engine.generation import EngineStatus, generate
from foresay.server.engine_process import frames, local
from foresay.server.engine_process.client import EngineClient
from foresay.server.settings.config import EngineConfig, ServeConfig
from foresay.server.settings.resolved import BUNDLED
from foresay.spec.request import Request
from foresay.spec.sampling import SamplingParams
from tests.drafters.test_regimes import Foresight
from tests.server.known_costs import STEPS, known
from tests.server.live import send_signal
from tests.server.wire import until
from tests.spec.harness import Harness
from tests.spec.tables import TableModel

SECONDS = 180.0
ROOT = Path(__file__).parents[2]
CHOOSING = [
    *(f"tests/server/test_{name}.py" for name in ("prediction", "live", "custom_drafters", "costs")),
    *("tests/telemetry/test_names.py", "tests/dashboard/test_playground.py"),
]


def run(costs: Costs, said: list[str]) -> tuple[object, ...]:
    """What a start asks for. said: gets what is measured."""
    harness = Harness(TableModel(3), pages=200, max_model_len=64)
    profile_run = ProfileRun(harness.engine.info, harness.verifier, harness.pool, costs, said.append)
    curve, draft = profile_run.curve(), profile_run.draft_cost(Foresight([1] * 200, lambda position: 0.5), 12)
    found = curve.points, draft.seconds(3, 2), profile_run.root_seconds()
    return found


def test_what_is_known_is_not_measured_and_is_what_it_was() -> None:
    costs, said = Costs(), list[str]()
    assert not costs.given("these")
    found = run(costs, said)
    assert said == ["measuring the step cost", "measuring what drafting costs", "timing plain steps"]
    sent = frames.unpack_up(frames.pack(frames.Start(EngineConfig(), costs=costs))[frames.HEADER_BYTES :])
    assert isinstance(sent, frames.Start) and sent.costs.given("these")
    said.clear()
    assert run(sent.costs, said) == found and not said
    assert not sent.costs.given("others") and sent.costs == Costs("others")


def test_what_nobody_measured_is_taken_by_the_first_engine_as_it_is() -> None:
    costs = known()
    assert costs.given("these") and costs == replace(known(), of="these")
    assert not costs.given("others") and costs == Costs("others")


def test_the_engines_of_tests_are_given_theirs() -> None:
    said: list[str] = []
    engine = build_engine(
        EngineConfig(draft="auto", max_model_len=64, threads=1), lambda phase, share=None: said.append(phase)
    )
    assert not any(phase.startswith(("measuring", "timing")) for phase in said)
    assert engine.scheduler.cost.points == STEPS and engine.info.root_seconds == STEPS[0][1]


@pytest.mark.soak
def test_no_test_hangs_on_measured_time() -> None:
    """Where all that is measured is wrong: those in which costs decide who drafts, or how much."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests/wild"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CHOOSING]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_digest_distinguishes_settings_files_and_the_rest(tmp_path: Path) -> None:
    file, config = tmp_path / "model.safetensors", EngineConfig()
    file.write_bytes(b"one")
    found = [digest(config, [tmp_path], "cpu", 2), digest(config, [tmp_path], "cpu", 1), digest(config, [], "cpu", 2)]
    found += [digest(replace(config, **{name: "x"}), [tmp_path], "cpu", 2) for name in ("target", "draft", "dtype")]
    assert digest(config, [tmp_path], "cpu", 2) == found[0]
    os.utime(file, ns=(1, 1))
    found.append(digest(config, [tmp_path], "cpu", 2))
    file.write_bytes(b"more")
    os.utime(file, ns=(1, 1))
    found.append(digest(config, [tmp_path], "cpu", 2))
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    found.append(digest(config, [tmp_path], "cpu", 2))
    assert len(set(found)) == len(found)


def test_what_a_server_measured_is_known_to_those_that_start_within_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured, later = known(), Costs()
    assert measured.given("these") and not later.given("these") and not later.recall()
    measured.keep()
    assert later.recall() and later == measured
    assert not Costs("others").recall()
    now = time.time()
    for moved in (86_401, -2):
        monkeypatch.setattr(time, "time", lambda moved=moved: now + moved)
        assert not Costs("these").recall()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (file,) = (tmp_path / "foresay" / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert not Costs("these").recall()


MEASURED = {"probing exactness", "measuring the step cost", "timing plain steps"}
QUICK: dict[str, Any] = {"draft": "ngram", "max_model_len": 64, "threads": 1, "max_seqs": 1}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rounds of steps, and the probes, of engines in this process, which keep what they find in a new folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("FORESAY_WEIGHT_CACHE", "FORESAY_KV_DISK"):  # the suite's: a command reads them, a script does not
        monkeypatch.delenv(variable)
    monkeypatch.setattr(local, "Costs", Costs)
    done: list[str] = []

    def counted(where: object, name: str) -> None:
        found = getattr(where, name)

        def noted(*given: Any, **named: Any) -> Any:
            done.append(name)
            return found(*given, **named)

        monkeypatch.setattr(where, name, noted)

    counted(handover, "probe")
    counted(ProfileRun, "turns")
    return done


def test_a_second_engine_in_a_script_or_command_neither_probes_nor_measures(
    tmp_path: Path, work: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(BUNDLED / "target", tmp_path / "target")

    def started(**changes: Any) -> tuple[set[str], list[int]]:
        work.clear()
        said: list[str] = []
        given = QUICK | changes
        with Engine(str(tmp_path / "target"), progress=lambda phase, share=None: said.append(phase), **given) as engine:
            text = engine.generate("The old king", SamplingParams(seed=1, max_tokens=16)).token_ids
        assert ("probe" in work, "turns" in work) == ("probing exactness" in said, "timing plain steps" in said)
        return MEASURED & {*said}, text

    first, text = started()
    assert first == MEASURED
    assert started() == (set(), text)
    work.clear()
    flags = [word for name, value in QUICK.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    prompted = ["--prompt", "The old king", "--max-tokens", "4", "--seed", "3"]
    assert main(["generate", str(tmp_path / "target"), *flags, *prompted]) == 0
    assert not work and "| exact |" in capsys.readouterr().err
    assert started(page_size=32) == (MEASURED, text), "other settings"
    os.utime(tmp_path / "target" / "model.safetensors")
    assert started() == (MEASURED, text), "another model"
    assert started() == (set(), text)


@pytest.mark.slow
async def test_the_engine_after_one_that_died_measures_only_what_is_new(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        shutil.copytree(BUNDLED / name, tmp_path / name)
    config = ServeConfig(
        target=str(tmp_path / "target"), draft=str(tmp_path / "draft"), max_seqs=1, max_model_len=512, threads=1
    )
    engine, seen = EngineClient(config), list[EngineStatus]()
    engine._costs, measuring = Costs(), asyncio.Event()

    def see(status: EngineStatus) -> None:
        seen.append(status)
        if status.message.startswith("measuring"):
            measuring.set()

    engine.observe_status = [see]
    await engine.start()
    try:
        async with asyncio.timeout(SECONDS):
            await measuring.wait()
            assert await measured(engine, seen), "the one before it never got ready"
            right, costs = await written(engine), engine._costs
            text = asyncio.create_task(written(engine, "killed", 40))
            await until(lambda: engine.status.starts > 2)
            assert await text == right
            assert not await measured(engine, seen, kill=False) and engine._costs == costs
            os.utime(tmp_path / "draft" / "model.safetensors")
            assert await measured(engine, seen) and await written(engine) == right
            await engine.reload(replace(config, draft="none"))
            assert engine._costs.steps != costs.steps and not engine._costs.drafts
            assert await written(engine) == right and not await measured(engine, seen)
    finally:
        await engine.stop()


async def measured(engine: EngineClient, seen: list[EngineStatus], kill: bool = True) -> bool:
    """Whether the engine after this one, which is killed, measures; if not, it says why."""
    if kill:
        number = engine.status.starts
        send_signal(engine, signal.SIGKILL)
        await until(lambda: engine.status.starts > number)
    await engine.until_ready()
    said = [status.message for status in seen if status.starts == engine.status.starts]
    took_over = "taking over the previous engine's measurements" in said
    assert took_over != any(one.startswith(("measuring", "timing")) for one in said)
    return not took_over


async def written(engine: EngineClient, id: str = "text", killed_at: int | None = None) -> list[int]:
    """The tokens of a text. killed_at: so many tokens are there when the engine is killed."""
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=7, ignore_eos=True)
    tokens: list[int] = []
    async for delta in generate(engine, Request(id=id, prompt=[5, 6, 7], params=params)):
        tokens += delta.tokens
        if killed_at is not None and len(tokens) >= killed_at:
            send_signal(engine, signal.SIGKILL)
            killed_at = None
    return tokens
