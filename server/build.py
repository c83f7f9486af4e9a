"""From a configuration to a running engine: the one place that knows every concrete class."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from drafters.draft_model import DraftModelDrafter
from kvpaging import KVStore, PagePool, PageTable, PrefixIndex
from server.config import EngineConfig
from server.device import Device, find_device, synchronize
from server.drafting import DEFAULT_TOKENS, Drafting, Drafts, alone, named_in, pinned
from server.graphs import capture_of, graph_runner
from server.heads import doubts, load_head
from server.lookup import LOOKUPS
from server.memory import MemoryPlan, check_beside, footprint, kept_in_16_bits, packed_bytes, plan
from server.parameters import stored_parameters
from server.rehearsal import Rehearsal
from server.translation import translation
from server.unfit import Unfit
from spec.budget import StepCost
from spec.engine import Engine
from spec.errors import ConfigurationError
from spec.names import DRAFT_MODEL, EAGLE3, MEDUSA, NONE, SUFFIX
from spec.observer import Observer
from spec.protocols import Drafter, Rows
from spec.request import EngineInfo
from spec.scheduler import Scheduler
from spec.tree import MAX_NODES, TreeShape
from verifier.model.config import ModelConfig
from verifier.model.decoder import Decoder
from verifier.model.hub import resolve
from verifier.model.weights import load
from verifier.ops.kernels.cpu import threads
from verifier.paged_model import PagedModel
from verifier.probe import Exactness, probe


class Progress(Protocol):
    """Told while the engine loads: what is being done now, and how much of it is done (0 to 1) where that is known."""

    def __call__(self, phase: str, share: float | None = None) -> None: ...


#: A prompt and an answer of one token each.
LEAST_TOKENS = 2
BUNDLED = Path(__file__).parent / "bundled"
#: Drafters that come with the bundled target. The heads fit it alone.
BUNDLED_HEADS = (MEDUSA, EAGLE3)
BUNDLED_MODEL = f"{DRAFT_MODEL}:{BUNDLED / 'draft'}"
#: Drafters that every target has, of those that bring something beside the others: ngram finds what suffix finds too.
AUTO = (SUFFIX,)
#: Row counts the start-up measurement times, and when it stops going further (seconds of one pass).
_MEASURED_ROWS = (2, 4, 8, 16, 32, 64, 128, 256)
_MEASURE_PATIENCE = 0.4


@dataclass(frozen=True, slots=True)
class Choice:
    """A setting that was resolved, and why."""

    value: str
    reason: str


def target_directory(config: EngineConfig) -> Path:
    """The target's local directory (downloaded first, for a hub id)."""
    return BUNDLED / "target" if config.target == "bundled" else resolve(config.target, flag="TARGET")


def choose_draft(config: EngineConfig) -> Choice:
    """Who drafts, in one word or several with commas between them.

    Raises ConfigurationError for a bundled head (``medusa``, ``eagle3``) with another target.
    """
    if config.draft == "auto":
        if config.target == "bundled":
            return Choice(
                ",".join((BUNDLED_MODEL, *AUTO)),
                "the model that comes with the bundled target, and earlier text",
            )
        return Choice(
            ",".join(AUTO), "need no model; name a smaller model of the same family with --draft to gain more"
        )
    parts = [_found_draft(config, part) for part in named_in(config.draft)]
    bundled = len(parts) == 1 and config.draft in BUNDLED_HEADS
    return Choice(",".join(parts), "comes with the bundled target" if bundled else "asked for")


def _found_draft(config: EngineConfig, part: str) -> str:
    """What one name stands for."""
    if part not in BUNDLED_HEADS:
        return BUNDLED_MODEL if part in ("bundled", DRAFT_MODEL) else part
    if config.target != "bundled":
        raise ConfigurationError(
            f"--draft {part}: the bundled head fits the bundled target alone; name the folder of one that "
            f"was trained for {config.target} (--draft {part}:PATH), or make one with foresay train"
        )
    return f"{part}:{BUNDLED / part}"


def choose_dtype(config: EngineConfig, model: ModelConfig, device: Device) -> Choice:
    """``auto``: bf16 where the device multiplies it natively; else fp16 on a GPU, and fp32 on a CPU if it fits."""
    if config.dtype == "float32" and device.name.startswith("cuda"):
        raise Unfit("--dtype float32: the kernels for a GPU are made for 16-bit weights", "leave --dtype out")
    if config.dtype != "auto":
        return Choice(config.dtype, "asked for")
    if device.has_bf16:
        return Choice("bfloat16", f"the {'GPU' if device.is_gpu else 'processor'} multiplies bf16")
    if device.is_gpu:
        return Choice("float16", "the GPU has no bf16 instructions")
    if packed_bytes(model, "float32") < device.total / 2:
        kept = ", with weights kept in 16 bits" if kept_in_16_bits(model, "float32") else ""
        return Choice("float32", f"the processor has no bf16 instructions, fp32 is faster{kept}")
    return Choice("bfloat16", "fp32 would take more than half of the memory")


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
    model = ModelConfig.from_directory(directory)
    dtype, draft = choose_dtype(config, model, device), choose_draft(config)
    length = max_model_len(config, model)
    drafts = Drafts.of(config, draft.value)
    pinned(config)  # a shape that cannot be should be refused before anything is loaded
    models, translated = [model], None
    if drafts.directory is not None:
        models.append(ModelConfig.from_directory(drafts.directory))
        translated = translation(drafts.model, directory, model, drafts.directory, models[1])
    if others := (beside or {}).get(device.name, 0):  # free if they have to go, so what is free now says nothing
        by_itself = plan(config, length, dtype.value, models, drafts.head, replace(device, free=None))
        check_beside(footprint(by_itself, device), others)
    memory = plan(config, length, dtype.value, models, drafts.head, device)
    pool = PagePool(memory.pages, config.page_size)
    verifier = _paged_model("target", directory, model, dtype.value, pool, length, device, say)
    drafters: list[Drafter] = []
    warnings: list[str] = []
    if drafts.directory is not None:
        dynamic, columns = config.draft_growth == "dynamic", None if translated is None else translated.columns
        draft_model = _paged_model(
            "draft model", drafts.directory, models[1], dtype.value, pool, length, device, say, columns
        )
        if translated is None:
            drafters.append(DraftModelDrafter(draft_model, dynamic))
        else:
            read, token_ids = translated.read, translated.token_ids
            drafters.append(DraftModelDrafter(draft_model, dynamic, read=read, token_ids=token_ids))
            draft = Choice(draft.value, f"{draft.reason}, knows {translated.described}")
            warnings += filter(None, [translated.warning(drafts.model)])
    if not device.is_gpu:
        # Torch's ops in a step are small, and its threads would wait for each other in the place of the kernels'.
        torch.set_num_threads(1)
    say("probing exactness")
    exactness = probe(verifier, pool)
    if drafts.head is not None:
        say("reading the head's weights")
        heads = load_head(drafts.head, verifier, pool, config.draft_growth == "dynamic")
        drafters.append(heads)
        if against := doubts(drafts.head, heads, verifier, pool, directory):
            draft = Choice(draft.value, f"{draft.reason}, but {against}")
    if config.draft_history is not None:
        say("reading the draft history")
    drafters += drafts.lookup_drafters(config, model.vocab_size)
    if device.is_gpu and len(drafters) > 1:
        drafters = [alone(drafters)]
        draft = Choice(draft.value, f"{draft.reason}; where steps are captured {drafters[0].name} drafts alone")
    say("measuring the step cost")
    cost = StepCost.measure(lambda rows: _time_rows(verifier, pool, rows), _sizes(pool, length), _MEASURE_PATIENCE)
    info = _info(config, model, dtype, draft, exactness, memory, length, device)
    drafting = Drafting.of(config, drafters, info, verifier, pool, cost, device.is_gpu, say)
    runner = None
    if device.is_gpu:
        capture = capture_of(config.graphs)
        runner = graph_runner(verifier, drafting.drafter, drafting.shape, pool, length, config.max_seqs, capture, say)
    say("timing plain steps")
    info = msgspec.structs.replace(
        info,
        draft_shape=drafting.shape.widths,
        root_seconds=Rehearsal(info, verifier, pool, runner).root_seconds(),
        drafter=", ".join(drafter.name for drafter in drafters) or NONE,
        draft=", ".join(_placed(drafter.name, drafts) for drafter in drafters) or NONE,
        drafters=tuple(drafter.name for drafter in drafters),
        chosen=drafting.budget is not None,
        warnings=tuple(warnings),
    )
    prefix = PrefixIndex(pool) if config.prefix_cache else None
    return Engine(
        info=info,
        pool=pool,
        prefix=prefix,
        verifier=verifier,
        drafter=drafting.drafter,
        scheduler=Scheduler(
            pool, prefix, drafting.shape, cost, config.max_seqs, budget=drafting.budget, root_seconds=info.root_seconds
        ),
        observers=observers,
        runner=runner,
        crowded=threads.crowded,
    )


def draft_shape(config: EngineConfig, draft: Choice) -> TreeShape:
    """The tree each step drafts where it is always the same: a given one, a chain, or the root alone."""
    if draft.value == NONE:
        return TreeShape()
    return pinned(config) or TreeShape.chain(DEFAULT_TOKENS)


def short_name(name: str) -> str:
    """A model's name for people: ``bundled/draft`` instead of where the package lies."""
    path = Path(name.partition(":")[2] or name)
    return f"bundled/{path.name}" if path.is_relative_to(BUNDLED) else name


def _placed(name: str, drafts: Drafts) -> str:
    """A drafter and where it was loaded from, as ``--draft`` takes it."""
    place = drafts.model if name == DRAFT_MODEL else drafts.head.place if drafts.head and name not in LOOKUPS else ""
    return f"{name}:{short_name(place)}" if place else name


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


def _paged_model(
    role: str,
    directory: Path,
    config: ModelConfig,
    dtype: str,
    pool: PagePool,
    length: int,
    device: Device,
    say: Progress,
    columns: torch.Tensor | None = None,
) -> PagedModel:
    """role: what the model is called while it loads. columns: int64[V'], the only tokens of which logits are wanted;
    None for all."""
    reading = f"reading the {role}'s weights"
    say(reading)
    weights = load(directory, config, getattr(torch, dtype), device.name, lambda share: say(reading, share))
    if columns is not None:
        weights.lm_head = weights.lm_head[columns.to(weights.lm_head.device)]
    say(f"packing the {role}'s weights")
    decoder = Decoder(config, weights, length + MAX_NODES)
    store = KVStore(pool, config.num_layers, config.num_kv_heads, config.head_dim, decoder.dtype, decoder.device)
    return PagedModel(decoder, store, length)


def _sizes(pool: PagePool, length: int) -> list[int]:
    most = min((pool.num_pages - 1) * pool.page_size, length + MAX_NODES)
    return [rows for rows in _MEASURED_ROWS if rows <= most]


def _time_rows(verifier: PagedModel, pool: PagePool, rows: int) -> float:
    """The fastest of three passes over ``rows`` rows of a fresh sequence, in seconds."""
    table = PageTable(pool)
    table.reserve(rows)
    tokens = torch.zeros(rows, dtype=torch.int64)
    times = []
    try:
        for _ in range(3):
            synchronize(verifier.decoder.device)
            begun = time.perf_counter()
            verifier.run([Rows(table, tokens, 0, wanted="last")])
            synchronize(verifier.decoder.device)
            times.append(time.perf_counter() - begun)
    finally:
        table.release()
    return min(times)


def _info(
    config: EngineConfig,
    model: ModelConfig,
    dtype: Choice,
    draft: Choice,
    exactness: Exactness,
    memory: MemoryPlan,
    length: int,
    device: Device,
) -> EngineInfo:
    scratch = config.max_seqs * (MAX_NODES + config.page_size)
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
        weight_bytes=memory.weights["target"],
        memory=memory.described,
        footprint=footprint(memory, device),
    )
