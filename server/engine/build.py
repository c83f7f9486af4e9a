"""From a configuration to a running engine; only this module and :mod:`foresay.server.engine.drafters` know concrete
classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import msgspec
import torch

from foresay.kvpaging import PagePool, PrefixIndex, StatePages, WindowPages
from foresay.server.catalog.catalog import parameters_of
from foresay.server.engine.calibrate import COMPILED, ProfileRun
from foresay.server.engine.costs import Costs, digest
from foresay.server.engine.device import LoadContext, LoadProgress, find_device, give_back
from foresay.server.engine.drafters.entry import Entry, FromFiles
from foresay.server.engine.drafters.registry import drafts
from foresay.server.engine.drafting import (
    Drafting,
    capture_levels,
    capture_of,
    capture_passes,
    record_steps,
    runner_of,
)
from foresay.server.engine.handover import exactness_of, identity, opened
from foresay.server.engine.memory import Demand, MemoryPlan, check_others, footprint, plan_cpu
from foresay.server.engine.parameters import (
    FAST,
    Device,
    bits_of,
    choose_activations,
    choose_dtype,
    in_words,
    kv_kind,
    pinned,
    quantized,
    with_kv,
)
from foresay.server.engine.vocabulary import tokenizer
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import (
    BUNDLED,
    CannotRun,
    Resolved,
    choose_draft,
    max_model_len,
    short_name,
    target_directory,
)
from foresay.spec.engine import EngineCore
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import NONE
from foresay.spec.protocols import Drafter
from foresay.spec.request import EngineInfo
from foresay.spec.scheduler import Scheduler
from foresay.spec.step import StepRunner
from foresay.spec.tree import MAX_NODES
from foresay.verifier.graphs.capture import Capture, Eager
from foresay.verifier.model import weight_cache
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.eager import INTERPRETED, Op
from foresay.verifier.ops.kernels.cpu import threads
from foresay.verifier.ops.kernels.cpu.compiler import CompilationFailed
from foresay.verifier.ops.kernels.cpu.launch import llvm_errors
from foresay.verifier.probe import Exactness, probe


def plan(
    config: EngineConfig, length: int, dtype: str, target: ModelConfig, drafters: Sequence[Entry], device: Device
) -> MemoryPlan:
    """The memory plan: ``kv_tokens`` if given, else what the device has room for.

    length: the longest text. drafters: those that will be loaded.
    Raises CannotRun if the longest text does not fit the KV cache, or everything together not the device, and a
    loader's error for a drafter that cannot be read.
    """
    if device.is_gpu:
        from foresay.server.engine.gpu_memory import plan_gpu  # imports the GPU's kernels

        return plan_gpu(config, length, dtype, target, drafters, device)
    return plan_cpu(config, length, Demand.of(config, dtype, target, drafters), device.total)


def fitting(
    config: EngineConfig, length: int, dtype: str, target: ModelConfig, drafters: list[Entry], device: Device
) -> tuple[MemoryPlan, list[Entry]]:
    """The plan, and the drafters: those chosen by ``auto`` may be left out if there is no room or they were not
    measured."""
    needed = [left for one in drafters if (left := one if config.draft != "auto" else one.spared) is not None]
    if device.is_gpu:
        drafters = needed
    try:
        return plan(config, length, dtype, target, drafters, device), drafters
    except CannotRun:
        if needed == drafters:
            raise
        return plan(config, length, dtype, target, needed, device), needed


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was found and planned before a weight is read. named: the drafters. of: digest of what the costs of steps
    and drafts depend on."""

    loading: LoadContext
    memory: MemoryPlan
    dtype: Resolved
    activations: Resolved
    draft: Resolved
    named: list[Entry]
    of: str


def build_engine(
    config: EngineConfig,
    progress: LoadProgress | None = None,
    reserved: Mapping[str, int] | None = None,
    costs: Costs | None = None,
    cached: bool = False,
    keeps: bool = False,
) -> EngineCore:
    """Load the models, plan the memory, probe exactness, measure the step cost. reserved:
    bytes that the server's other engines hold, by device; raises :class:`foresay.server.engine.memory.NoRoom` if this
    one does not fit alongside them. costs: a previous engine's measurements, reused if the digest agrees and kept on
    disk for servers that start later; updated with new ones. Without them everything is measured. cached: whether the
    exactness that an earlier start probed is taken over. keeps: whether KV
    is kept on disk as the settings say; the caller that steps the engine writes it while idle.

    Raises :class:`ConfigurationError` (or a loader's error) saying what does not fit and which flag changes it.
    """
    made = partial(_built, config, progress or _ignore, reserved or {}, costs, cached, keeps)
    try:
        return made()
    except CompilationFailed:
        if config.bits == "portable":
            raise CannotRun(
                "--bits portable: LLVM cannot compile kernels for this processor", "leave --bits out"
            ) from None
        Op.by_reference = True  # torch computes everything
    return made()


def _built(
    config: EngineConfig,
    report: LoadProgress,
    reserved: Mapping[str, int],
    costs: Costs | None,
    cached: bool,
    keeps: bool,
) -> EngineCore:
    report("finding the models")
    torch.set_grad_enabled(False)
    threads.set_num_threads(config.threads or threads.num_threads())
    chosen = choose(config, report, reserved)
    loading, config, pool = chosen.loading, chosen.loading.config, chosen.loading.pool
    verifier = loading.paged_model("target", loading.target, loading.model, kv_dtype=config.kv_dtype)
    drafters = [loading.made.setdefault(one.option, one.load(loading, verifier)) for one in chosen.named]
    names = _placed([drafter.name for drafter in drafters], chosen.named)
    capture = _capture(loading, verifier, drafters)
    exactness = _exactness(chosen, verifier, cached)
    disk, on_disk = opened(loading, verifier, chosen.named) if keeps else (None, "")
    info = _info(chosen, exactness, names, on_disk)
    kept, costs = costs is not None and not loading.device.is_gpu, costs or Costs()
    if measured := costs.given(chosen.of) or (kept and costs.recall()):
        report("taking over the previous engine's measurements")
    profile_run = ProfileRun(info, verifier, pool, costs, report, _prose(loading))
    drafting, runner, recording = _drafting(loading, verifier, drafters, profile_run, capture)
    root, shape, budget = profile_run.root_seconds(runner if capture else None), drafting.shape, drafting.budget
    info = msgspec.structs.replace(
        info,
        draft_shape=shape.widths,
        root_seconds=root,
        chosen=budget is not None,
        warnings=(*info.warnings, *_compromises()),
    )
    drafting.cost.begun(root)
    verifier.record(drafting.drafter.needs)
    if kept and not measured:
        costs.keep()
    if (prefix := PrefixIndex(pool) if config.prefix_cache else None) is not None:
        prefix.disk = disk
    most = config.max_seqs, chosen.loading.device.chunk
    scheduler = Scheduler(pool, prefix, shape, drafting.cost, *most, budget=budget)
    give_back()
    if loading.unkept:
        weight_cache.save_later(loading.unkept)
    return EngineCore(
        info=info,
        pool=pool,
        prefix=prefix,
        verifier=verifier,
        drafter=drafting.drafter,
        scheduler=scheduler,
        runner=runner,
        crowded=threads.cpu_wait,
        ahead=chain(
            () if disk is None else disk.prefault(),
            recording,
            () if capture else capture_levels(verifier, drafting, 1, config.max_seqs, Eager),
        ),
    )


def choose(config: EngineConfig, report: LoadProgress, reserved: Mapping[str, int]) -> Chosen:
    """Find and plan what :func:`build_engine` loads, and raise what it raises of that. report: called with warnings."""
    device, directory = find_device(config), target_directory(config)
    model = quantized(ModelConfig.from_directory(directory), config.quantize, "--quantize")
    dtype, activations = choose_dtype(config, model, device), choose_activations(config, model, device)
    config = with_kv(config, model, dtype.value)
    draft = choose_draft(config)
    length = max_model_len(config, model)
    named = drafts(config, draft.value)
    pinned(config)  # refuses an invalid shape before anything is loaded
    named = [drafter.checked(directory, model) for drafter in named]
    for doubted in filter(None, (drafter.warning for drafter in named)):  # before a minute passes in loading it
        report(f"warning: {doubted}")
    if others := reserved.get(device.name, 0):  # they may be unloaded, so what is free now does not count
        by_itself, _ = fitting(config, length, dtype.value, model, named, replace(device, free=None))
        check_others(footprint(by_itself, device), others)
    memory, fits = fitting(config, length, dtype.value, model, named, device)
    if fits != named:
        reason = "without the target's copy, for which there is no room or which was not measured on this device"
        draft, named = Resolved(",".join(one.option for one in fits), reason), fits
    pool = PagePool(memory.pages, config.page_size)
    if memory.window_pages and model.sliding_window:
        pool.attach(WindowPages(memory.window_pages, model.sliding_window, pool.num_pages, pool.page_size))
    if memory.states is not None:
        pool.attach(StatePages(*memory.states, pool.page_size))
    loading = LoadContext(
        config,
        directory,
        model,
        dtype.value,
        length,
        device,
        pool,
        activations.value == "int8",
        report,
        away=memory.away,
        hosted=memory.hosted,
    )
    files = [directory, *(one.directory for each in named if isinstance(one := each.spared, FromFiles))]
    of = digest(config, files, device.name, threads.num_threads())
    return Chosen(loading, memory, dtype, activations, draft, named, of)


def _prose(loading: LoadContext) -> list[int]:
    """Token ids of some prose and code, for a mixture."""
    found = None if loading.model.stack.experts is None else tokenizer(loading.target)
    ids: list[int] = [] if found is None else found.encode((BUNDLED / "README.md").read_text("utf-8")).ids
    return [id for id in ids if id < loading.model.vocab_size]


def _exactness(chosen: Chosen, verifier: ModelRunner, cached: bool) -> Exactness:
    loading = chosen.loading
    if cached and not loading.device.is_gpu:
        return exactness_of(chosen.of, verifier, loading.pool, loading.report)
    loading.report("probing exactness")
    return probe(verifier, loading.pool)


def _capture(loading: LoadContext, verifier: ModelRunner, drafters: Sequence[Drafter]) -> Capture | None:
    """What captures a GPU's steps, with the target's passes captured; None on a CPU."""
    if loading.device.is_gpu:
        capture = capture_of(loading.config.graphs)
        most = loading.config.max_seqs, loading.device.chunk
        capture_passes(verifier, drafters, loading.length, *most, capture, loading.report)
        return capture
    # Torch's ops in a step are small, and its threads would compete with the kernels'.
    torch.set_num_threads(1)
    return None


def _drafting(
    loading: LoadContext,
    verifier: ModelRunner,
    drafters: Sequence[Drafter],
    profile_run: ProfileRun,
    capture: Capture | None,
) -> tuple[Drafting, StepRunner, Iterator[None]]:
    """The drafting, by measured costs, the step runner, and what may be recorded for it later. capture: a GPU's."""
    config, report, chunk = loading.config, loading.report, loading.device.chunk
    if capture is None:
        drafting = Drafting.of(config, drafters, profile_run, verifier)
        for _ in capture_levels(verifier, drafting, 1, 1, Eager):  # what the first request needs: a CPU records it
            pass
        runner, recording = record_steps(verifier, drafting)
        next(recording, None)
        return drafting, runner, recording
    report("compiling kernels")  # first: measurements must not include compilation
    shape = pinned(config)
    shapes = COMPILED if shape is None else (shape,)
    for member in [*drafters, None][: max(1, len(drafters))]:
        for each in shapes[:1] if member is None else shapes:
            profile_run.compile(member, each, config.max_seqs, chunk)
    drafting = Drafting.of(config, drafters, profile_run, verifier)
    for part in capture_levels(verifier, drafting, loading.length, config.max_seqs, capture):
        report("capturing drafts", part)
    runner = runner_of(verifier, drafting, loading.length, config.max_seqs, chunk, capture, report)
    return drafting, runner, iter(())


def _placed(names: Sequence[str], drafts: Sequence[Entry]) -> dict[str, str]:
    """How ``--draft`` would name each drafter, by its name. Raises ConfigurationError if two have the same name."""
    placed: dict[str, str] = {}
    for name, draft in zip(names, drafts, strict=True):
        if name in placed:
            raise ConfigurationError(f"--draft {draft.option}: is called {name}, as is {placed[name]}; rename one")
        placed[name] = draft.setting(name, short_name(draft.location) if draft.location else "")
    return placed


def _compromises() -> tuple[str, ...]:
    """A sentence on kernels that LLVM did not compile for this processor."""
    if not llvm_errors:
        return ()
    instead = "they take fewer rows at once, which is slower"
    if Op.by_reference:
        instead = "torch computes everything instead, many times slower"
    return (f"LLVM cannot compile some kernels for this processor ({llvm_errors[0]}): {instead}; please report this",)


def _ignore(phase: str, share: float | None = None) -> None:
    pass


def _info(chosen: Chosen, exactness: Exactness, names: Mapping[str, str], on_disk: str) -> EngineInfo:
    """names: how ``--draft`` would name each drafter, by its name. on_disk: as reported."""
    loading, memory = chosen.loading, chosen.memory
    config, model = loading.config, loading.model
    bits = FAST if Op.by_reference or INTERPRETED else bits_of(loading.dtype, loading.device.is_gpu)
    kept, scratch = kv_kind(model, config.kv_dtype), config.max_seqs * (MAX_NODES + config.page_size)
    return EngineInfo(
        target=config.target,
        drafter=", ".join(names) or NONE,
        draft=", ".join(names.values()) or NONE,
        drafters=tuple(names),
        drafter_reason="".join([chosen.draft.reason, *(one.remark for one in chosen.named)]),
        warnings=tuple(one.warning for one in chosen.named if one.warning),
        dtype=loading.dtype,
        dtype_reason=chosen.dtype.reason,
        device=str(loading.device),
        exact=exactness.exact,
        exact_reason=exactness.reason,
        kv_tokens=(memory.pages - 1) * config.page_size - scratch,
        page_size=config.page_size,
        max_model_len=loading.length,
        max_seqs=config.max_seqs,
        draft_shape=(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        architecture=model.architecture,
        layers=model.num_layers,
        hidden_size=model.hidden_size,
        trained_length=model.max_positions,
        parameters=parameters_of(model),
        quantization=in_words(model, loading.dtype, chosen.activations.value),
        bits=bits,
        activations=chosen.activations.value,
        activations_reason=chosen.activations.reason,
        weight_bytes=memory.weights["target"] + memory.host,
        memory=memory.described,
        kv_dtype=loading.dtype if kept == "auto" else kept,
        kv_token_bytes=memory.token_bytes,
        footprint=footprint(memory, loading.device),
        kv_disk=on_disk,
        identity=identity(loading, chosen.activations.value, bits, exactness.exact),
    )
