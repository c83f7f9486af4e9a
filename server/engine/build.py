"""From a configuration to a running engine; it and :mod:`server.engine.drafters` are what knows concrete classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import torch

from kvpaging import PagePool, PrefixIndex
from server.engine.calibrate import DRAFTED, ProfileRun
from server.engine.device import Device, find_device
from server.engine.drafters.entry import Entry
from server.engine.drafters.registry import drafts
from server.engine.drafting import DEFAULT_TOKENS, Drafting, pinned
from server.engine.graphs import capture_levels, capture_of, capture_passes, runner_of
from server.engine.loading import Loading, Progress
from server.engine.memory import MemoryPlan, check_beside, footprint, kept_in_16_bits, packed_bytes
from server.engine.parameters import stored_parameters
from server.engine.plan import plan
from server.engine.quantized import in_words, kv_kind, quantized
from server.settings.config import EngineConfig
from server.settings.resolved import Resolved, choose_draft, short_name, target_directory
from server.settings.unfit import Unfit
from spec.engine import Engine
from spec.errors import ConfigurationError
from spec.names import NONE
from spec.observer import Observer
from spec.request import EngineInfo
from spec.scheduler import Scheduler
from spec.tree import MAX_NODES, TreeShape
from verifier.model.config import ModelConfig
from verifier.ops.kernels.cpu import threads
from verifier.probe import Exactness, probe

#: A prompt and an answer of one token each.
LEAST_TOKENS = 2


def choose_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> Resolved:
    """``auto``: bf16 where the device multiplies it natively; else fp16 on a GPU, and fp32 on a CPU if it fits."""
    if config.dtype == "float32" and device.name.startswith("cuda"):
        raise Unfit("--dtype float32: the kernels for a GPU are made for 16-bit weights", "leave --dtype out")
    if config.dtype != "auto":
        return Resolved(config.dtype, "asked for")
    if device.has_bf16:
        return Resolved("bfloat16", f"the {'GPU' if device.is_gpu else 'processor'} multiplies bf16")
    if device.is_gpu:
        return Resolved("float16", "the GPU has no bf16 instructions")
    if packed_bytes(model, "float32") < device.total / 2:
        kept = ", with weights kept in 16 bits" if kept_in_16_bits(model, "float32") else ""
        return Resolved("float32", f"the processor has no bf16 instructions, fp32 is faster{kept}")
    return Resolved("bfloat16", "fp32 would take more than half of the memory")


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    observers: Sequence[Observer] = (),
    beside: Mapping[str, int] | None = None,
) -> Engine:
    """Load the models, plan the memory, prove exactness, measure the step cost. observers: of the engine. beside: bytes
    that other engines of the server hold, by device; :class:`NoRoom` if this one does not fit beside them.

    Raises :class:`ConfigurationError` (or a loader's error) saying what does not fit and which flag changes it.
    """
    say = progress or _nobody
    say("finding the models")
    torch.set_grad_enabled(False)
    threads.use(config.threads or threads.wanted())
    device, directory = find_device(config), target_directory(config)
    model = quantized(ModelConfig.from_directory(directory), config.quantize, "--quantize")
    dtype, draft = choose_dtype(config, model, device), choose_draft(config)
    length = max_model_len(config, model)
    named = drafts(config, draft.value)
    pinned(config)  # a shape that cannot be should be refused before anything is loaded
    named = [drafter.checked(directory, model) for drafter in named]
    if others := (beside or {}).get(device.name, 0):  # free if they have to go, so what is free now says nothing
        by_itself = plan(config, length, dtype.value, model, named, replace(device, free=None))
        check_beside(footprint(by_itself, device), others)
    memory = plan(config, length, dtype.value, model, named, device)
    pool = PagePool(memory.pages, config.page_size)
    loading = Loading(config, directory, model, dtype.value, length, device, pool, say)
    verifier = loading.paged_model("target", directory, model, kv_dtype=config.kv_dtype)
    drafters = [drafter.load(loading, verifier) for drafter in named]
    placed = _placed([drafter.name for drafter in drafters], named)
    if not device.is_gpu:
        # Torch's ops in a step are small, and its threads would wait for each other in the place of the kernels'.
        torch.set_num_threads(1)
    else:
        capture = capture_of(config.graphs)
        capture_passes(verifier, drafters, length, config.max_seqs, capture, say)
    say("probing exactness")
    exactness = probe(verifier, pool)
    doubts = [entry.doubts(made, verifier, pool, directory) for entry, made in zip(named, drafters, strict=True)]
    reasons = [draft.reason]
    for entry, doubt in zip(named, doubts, strict=True):
        reasons.append(entry.remark + (f", but {doubt}" if doubt else ""))
    draft = Resolved(draft.value, "".join(reasons))
    info = _info(config, model, dtype, draft, exactness, memory, length, device)
    profile_run, runner = ProfileRun(info, verifier, pool), None
    if device.is_gpu:
        say("compiling kernels")  # first: what is measured is not to be a compiler's time
        for member in [*drafters, None][: max(1, len(drafters))]:
            profile_run.compile(member, pinned(config) or DRAFTED, config.max_seqs)
    drafting = Drafting.of(config, drafters, profile_run, say)
    if device.is_gpu:
        capture_levels(verifier, drafting, length, config.max_seqs, capture, say)
        runner = runner_of(verifier, drafting, length, config.max_seqs, capture, say)
    say("timing plain steps")
    info = msgspec.structs.replace(
        info,
        draft_shape=drafting.shape.widths,
        root_seconds=ProfileRun(info, verifier, pool, runner).root_seconds(),
        drafter=", ".join(drafter.name for drafter in drafters) or NONE,
        draft=", ".join(placed[drafter.name] for drafter in drafters) or NONE,
        drafters=tuple(drafter.name for drafter in drafters),
        chosen=drafting.budget is not None,
        drafter_doubts=tuple(doubt for doubt in doubts if doubt),
        warnings=tuple(drafter.warning for drafter in named if drafter.warning),
    )
    prefix = PrefixIndex(pool) if config.prefix_cache else None
    return Engine(
        info=info,
        pool=pool,
        prefix=prefix,
        verifier=verifier,
        drafter=drafting.drafter,
        scheduler=Scheduler(
            pool,
            prefix,
            drafting.shape,
            drafting.cost,
            config.max_seqs,
            budget=drafting.budget,
            root_seconds=info.root_seconds,
        ),
        observers=observers,
        runner=runner,
        crowded=threads.crowded,
    )


def draft_shape(config: EngineConfig, draft: Resolved) -> TreeShape:
    """The tree each step drafts where it is always the same: a given one, a chain, or the root alone."""
    if draft.value == NONE:
        return TreeShape()
    return pinned(config) or TreeShape.chain(DEFAULT_TOKENS)


def _placed(names: Sequence[str], drafts: Sequence[Entry]) -> dict[str, str]:
    """By the name of each drafter, how ``--draft`` would name it. Raises ConfigurationError for two of one name."""
    placed: dict[str, str] = {}
    for name, draft in zip(names, drafts, strict=True):
        if name in placed:
            raise ConfigurationError(f"--draft {draft.asked}: is called {name}, as is {placed[name]}; rename one")
        placed[name] = draft.setting(name, short_name(draft.place) if draft.place else "")
    return placed


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """The longest text, prompt and output together; raises Unfit if more is asked for than the target holds."""
    wanted = config.max_model_len or model.max_positions
    if wanted > model.max_positions:
        raise Unfit(
            f"max_model_len is {wanted}, but the model holds at most {model.max_positions} tokens",
            f"--max-model-len {model.max_positions} is the most",
        )
    if config.max_model_len is None and config.kv_tokens is not None:
        wanted = min(wanted, config.kv_tokens)
    if wanted < LEAST_TOKENS:
        raise Unfit(
            f"max_model_len is {wanted}: no text of {wanted} holds a prompt and an answer",
            f"--max-model-len and --kv-tokens must be at least {LEAST_TOKENS}, and so must what the model holds",
        )
    return wanted


def _nobody(phase: str, share: float | None = None) -> None:
    pass


def _info(
    config: EngineConfig,
    model: ModelConfig,
    dtype: Resolved,
    draft: Resolved,
    exactness: Exactness,
    memory: MemoryPlan,
    length: int,
    device: Device,
) -> EngineInfo:
    scratch, kept = config.max_seqs * (MAX_NODES + config.page_size), kv_kind(model, config.kv_dtype)
    return EngineInfo(
        target=config.target,
        drafter=NONE,
        drafter_reason=draft.reason,
        dtype=dtype.value,
        dtype_reason=dtype.reason,
        device=str(device),
        exact=exactness.exact,
        exact_reason=exactness.reason,
        kv_tokens=(memory.pages - 1) * config.page_size - scratch,
        page_size=config.page_size,
        max_model_len=length,
        max_seqs=config.max_seqs,
        draft_shape=(),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        architecture=model.architecture,
        parameters=stored_parameters(model),
        quantization=in_words(model, dtype.value),
        weight_bytes=memory.weights["target"],
        memory=memory.described,
        kv_dtype=dtype.value if kept == "auto" else kept,
        kv_token_bytes=memory.token_bytes,
        footprint=footprint(memory, device),
    )
