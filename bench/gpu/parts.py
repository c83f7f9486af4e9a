"""The parts of the benchmark in their order: what the bars are about first, the other models last."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

from bench.gpu import kernel_tests, kernels, verify
from bench.gpu.cases import Cases
from bench.gpu.compiling import compile_all
from bench.gpu.models import BUNDLED, inflated, paged, scribble
from bench.gpu.probe import probe
from bench.gpu.session import Session
from bench.gpu.shapes import ModelShape
from kvpaging import PagePool
from verifier.model.config import ModelConfig
from verifier.paged_model import PagedModel

PAGE = 16
#: Pages beside those of the longest context: rows of a tree, and the padding page.
SPARE_PAGES = 16


def run_all(session: Session, args: argparse.Namespace) -> None:
    """Every part that is asked for and fits."""
    wanted: list[str] | None = args.only
    for name, needs, run in parts(session, args):
        if wanted is None or any(name.startswith(only) for only in wanted):
            session.part(name, needs, run)


def parts(session: Session, args: argparse.Namespace) -> list[tuple[str, float, Callable[[], object]]]:
    """Name, least seconds and function of each part."""
    chosen, brief = session.settings, 0.0 if args.tiny else 1.0
    found: list[tuple[str, float, Callable[[], object]]] = [
        ("probe", 5 * brief, partial(probe_part, session)),
        ("compile", 20 * brief, partial(compile_part, session, args)),
        ("tests", 20 * brief, partial(tests_part, session)),
        (f"kernels {chosen.bar.name}", 10 * brief, partial(kernels_part, session, chosen.bar)),
    ]
    for model in chosen.models:
        found.append((f"steps {model.name}", 20 * brief, partial(steps_part, session, model)))
    for model in chosen.models:
        if model is not chosen.bar:
            found.append((f"kernels {model.name}", 10 * brief, partial(kernels_part, session, model)))
    return found


def probe_part(session: Session) -> None:
    """The bandwidth that everything is divided by."""
    found = probe(session.device, session.settings.probe_bytes, max(0.02, session.settings.patience))
    session.read = found.read
    session.found["bandwidth"] = asdict(found)
    session.say(f"reads {found.read / 1e9:.0f} GB/s ({found.way}), copies {found.copy / 1e9:.0f} GB/s")


def compile_part(session: Session, args: argparse.Namespace) -> None:
    """Pass 0."""
    flags = ["--device", args.device, *(["--tiny"] if args.tiny else [])]
    names = [model.name for model in (session.settings.models[:1] if args.tiny else session.settings.models)]
    session.found["compile_seconds"] = compile_all(flags, names, session.clock.left)


def tests_part(session: Session) -> None:
    """Part a."""
    limit = min(session.settings.tests_limit, session.clock.left)
    found = kernel_tests.run(session.device, session.settings.tests, limit)
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
    """Part c, and of the bars' model all that needs the whole of it."""
    chosen, device = session.settings, session.device
    config, decoder = inflated(device, model, BUNDLED / "target", chosen.positions)
    assert config.vocab_size == model.vocab
    pool = PagePool(-(-max(chosen.contexts) // PAGE) + SPARE_PAGES, PAGE)
    target = paged(pool, decoder, device)
    scribble(target.store)
    timed = verify.measure(device, target, chosen.rows, chosen.contexts, session.read, session.clock, chosen.patience)
    verify.show(model.name, timed)
    session.found.setdefault("steps", {})[model.name] = verify.as_json(timed)
    if model is chosen.bar:
        bars_of_steps(session, target, timed)


def bars_of_steps(session: Session, target: PagedModel, timed: list[verify.Timed]) -> None:
    """What the bars want to know of verifying steps."""
    shortest = min(session.settings.contexts)
    single = [t.multiple for t in timed if t.rows == 1 and t.context == shortest]
    session.measured |= {
        "plain_step_over_floor": single[0] if single else None,
        "verify_64_over_1": verify.row_factor(timed, max(session.settings.rows)),
        "ns_per_context_token": verify.nanoseconds_per_token(timed),
    }
    steady = verify.steadiness(session.device, target, shortest, session.settings.steps, session.clock)
    session.found["steadiness"] = steady
    session.measured["p99_over_p50"] = steady["p99_over_p50"]
    warm = verify.temperature(session.device, target, shortest, 4 * session.settings.patience)
    session.found["temperature"] = warm
    session.measured["temperature_1_over_0"] = warm["ratio"]
