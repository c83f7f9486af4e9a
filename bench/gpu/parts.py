"""The parts of the benchmark in their order: what the bars are about first, the other models last."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from bench import record
from bench.gpu import bits, gaps, kernel_tests, kernels
from bench.gpu.bar import SPARE_TOKENS, BarModel, time_steps
from bench.gpu.cases import Cases
from bench.gpu.compiling import CHUNK, ROOT, SWEEP, compile_all
from bench.gpu.engines import PAGE
from bench.gpu.models import BUNDLED, inflated, paged, random_model
from bench.gpu.probe import probe
from bench.gpu.session import Session
from bench.gpu.shapes import ModelShape
from foresay.kvpaging import PagePool
from foresay.spec.tree import MAX_NODES
from foresay.verifier.model.config import ModelConfig

Part = tuple[str, float, Callable[[], object]]


def run_all(session: Session, args: argparse.Namespace) -> None:
    """Every part that is asked for and fits; the probe in any case, for floors are made of it."""
    wanted: list[str] | None = args.only
    for name, needs, run in parts(session, args):
        if wanted is None or name == "probe" or any(name.startswith(only) for only in wanted):
            session.part(name, needs, run)


def parts(session: Session, args: argparse.Namespace) -> list[Part]:
    """Name, least seconds and function of each part."""
    chosen, brief = session.settings, 0.0 if args.tiny else 1.0
    bar = BarModel(session)
    others = [model for model in chosen.models if model is not chosen.bar]
    return [
        ("probe", 5 * brief, partial(probe_part, session)),
        ("gaps", 5 * brief, partial(gaps_part, session)),
        ("compile and test", 30 * brief, partial(compile_and_test, session, args)),
        (f"steps {chosen.bar.name}", 20 * brief, bar.steps),
        (f"drafting {chosen.bar.name}", 10 * brief, bar.drafting),
        (f"same tokens {chosen.bar.name}", 10 * brief, bar.same),
        (f"split {chosen.bar.name}", 5 * brief, bar.split),
        (f"engine {chosen.bar.name}", 10 * brief, bar.speed),
        ("bits", 20 * brief, partial(bits_part, session)),
        ("generate", 20 * brief, partial(generate_part, session)),
        (f"kernels {chosen.bar.name}", 10 * brief, partial(kernels_part, session, chosen.bar)),
        ("sweep", 20 * brief, partial(sweep_part, session)),
        *((f"steps {model.name}", 20 * brief, partial(steps_part, session, model)) for model in others),
        *((f"kernels {model.name}", 10 * brief, partial(kernels_part, session, model)) for model in others),
    ]


def probe_part(session: Session) -> None:
    """The bandwidth that everything is divided by."""
    found = probe(session.device, session.settings.probe_bytes, max(0.02, session.settings.patience))
    session.read = found.read
    session.found["bandwidth"] = asdict(found)
    session.say(f"reads {found.read / 1e9:.0f} GB/s ({found.way}), copies {found.copy / 1e9:.0f} GB/s")


def compile_and_test(session: Session, args: argparse.Namespace) -> None:
    """Pass 0, and beside it part a, most of whose time is compiling too."""
    chosen = session.settings
    clock = session.clock.slice(chosen.tests_limit)
    running = kernel_tests.Running(session.device, chosen.tests)
    try:
        flags = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
        names = [model.name for model in (chosen.models[:1] if args.tiny else chosen.models)] + [SWEEP]
        took = session.found["compile_seconds"] = compile_all(flags, names, clock.left)
        session.clock.skipped += [f"the rest of compiling for {name}" for name in names if name not in took]
    finally:
        found = running.finish(clock.left)
    session.found["tests"] = asdict(found)
    session.say(f"{found.passed} passed, {found.failed} failed, {found.skipped} skipped")
    session.expect(found.good, f"tests: {found.failed} failed{'' if found.ended else ', not done in time'}")


def kernels_part(session: Session, model: ModelShape) -> None:
    """Part b."""
    chosen, device = session.settings, session.device
    cases = Cases(model.config(ModelConfig.from_directory(BUNDLED / "target")), device.torch, device.dtype)
    every = cases.all(chosen.rows, chosen.contexts)
    results = kernels.measure(device, every, session.read, session.clock, chosen.patience)
    kernels.show(results)
    beside = kernels.against_library(device, cases, chosen.rows, session.read, session.clock, chosen.patience)
    kernels.show_library(beside)
    session.found.setdefault("kernels", {})[model.name] = kernels.as_json(results)
    session.found.setdefault("library", {})[model.name] = beside
    for result in results:
        session.expect(result.passed, f"kernel {result.name}: error {result.error:.2e}")


def steps_part(session: Session, model: ModelShape) -> None:
    """Part c."""
    chosen = session.settings
    _, decoder = inflated(session.device, model, BUNDLED / "target", chosen.positions)
    pool = PagePool((max(chosen.contexts) + SPARE_TOKENS) // PAGE, PAGE)
    time_steps(session, model, paged(pool, decoder, session.device))


def gaps_part(session: Session) -> None:
    """Part h."""
    session.found["gaps_us"] = gaps.gaps(session.device, session.settings.patience)


def sweep_part(session: Session) -> None:
    """The rest of part h."""
    chosen, device = session.settings, session.device
    config = chosen.bar.config(ModelConfig.from_directory(BUNDLED / "target"))
    found = list(gaps.sweep(device, config, chosen.swept, session.read, session.clock, chosen.patience / 3))
    gaps.show(found)
    session.found["sweep"] = found
    for one in found:
        wide = one["error"] > kernels.LIMITS[device.dtype]
        session.expect(not wide, f"sweep of {one['weight']}, {one['of_rows']} rows: error {one['error']:.1e}")


def bits_part(session: Session) -> None:
    """Part i."""
    chosen, device = session.settings, session.device
    positions = max(chosen.bits) + 2 * CHUNK
    decoder = random_model(device, chosen.bar, positions)
    model = paged(PagePool(2 + positions // PAGE, PAGE), decoder, device)
    found = session.found["bits"] = bits.compare(model, chosen.bits, MAX_NODES)
    record.table("a row's bits in every company", ["", "same"], [[way, same] for way, same in found.items()])
    for way, same in found.items():
        session.expect(same, f"other bits: {way}")


def generate_part(session: Session) -> None:
    """``foresay generate`` as it comes, with drafts and without: the text has to be the same."""
    asked = ["--prompt", "Once upon a time", "--max-tokens", "48", "--max-model-len", "512", "--seed", "7", "--json"]
    command = [
        sys.executable,
        "-m",
        "foresay.server.cli.main",
        "generate",
        *asked,
        "--device",
        session.device.torch.type,
    ]
    texts = {}
    for draft in ("auto", "none"):
        done = subprocess.run(
            [*command, "--draft", draft], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
        )
        if done.returncode:
            raise RuntimeError(f"foresay generate --draft {draft}: {done.stderr[-1500:]}")
        said = session.found.setdefault("generate", {})[draft] = json.loads(done.stdout.splitlines()[-1])
        texts[draft] = said["text"]
    session.expect(texts["auto"] == texts["none"], "foresay generate: other text with drafts than without")
