"""``foresay models``: known targets, their memory in bf16, int8 and int4, and which of these fit this device, by the
server's own memory plan. ``foresay models NAME``: one of them, with its drafts and how to serve it. Imports torch only
if there may be a GPU.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from foresay.server.catalog import catalog
from foresay.server.catalog.catalog import KnownDraft, KnownTarget, find_target, on_disk
from foresay.server.engine.memory import Demand, plan_cpu
from foresay.server.engine.parameters import (
    Device,
    choose_dtype,
    item_bytes,
    may_have_gpu,
    model_bytes,
    token_bytes,
    with_kv,
)
from foresay.server.settings.config import EngineConfig
from foresay.server.settings.resolved import BUNDLED, CannotRun, heads_in
from foresay.server.settings.units import aligned, bytes_in_words, count_in_words
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import SUFFIX
from foresay.verifier.model.config import ModelConfig

#: Formats of weights, and the value of ``--quantize`` for each: the first that fits loses least.
WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}
#: Tokens of the KV cache that is included.
TOKENS = 4096


@dataclass(frozen=True, slots=True)
class _Draft:
    """A drafter whose files are not on disk, with the interface that the memory plan needs."""

    known: KnownDraft

    def shapes(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return () if self.known.shape is None else (self.known.shape.model(),)

    def with_states(self, target: ModelConfig) -> tuple[ModelConfig, ...]:
        return self.shapes(target)

    def token_bytes(self, target: ModelConfig, dtype: str) -> int:
        models = self.shapes(target)
        return token_bytes(models[0], dtype, "auto") if models else item_bytes(dtype) * self.known.numbers_per_token

    def weights(self, dtype: str, packed: bool) -> Mapping[str, int]:
        shape, numbers = self.known.shape, self.known.parameters
        count = item_bytes(dtype) * numbers if shape is None else model_bytes(shape.model(), dtype, packed)
        return {self.known.kind: count}


def here() -> Device:
    """This machine's device, as the server would choose it."""
    if not may_have_gpu():
        return Device.cpu()
    from foresay.server.engine.device import find_device

    return find_device(EngineConfig())


def _planned(device: Device, model: ModelConfig, drafts: Sequence[_Draft], config: EngineConfig) -> int | None:
    """Bytes that a server with these settings would take; None if it would refuse, or there is less memory free now."""
    length = config.max_model_len or min(model.max_positions, config.kv_tokens or model.max_positions)
    dtype = choose_dtype(EngineConfig(), model, device).value
    config = with_kv(config, model, dtype)
    try:
        if device.is_gpu:
            from foresay.server.engine.gpu_memory import plan_gpu

            found = plan_gpu(config, length, dtype, model, drafts, device)
            return None if found.away else found.total
        taken = plan_cpu(config, length, Demand.of(config, dtype, model, drafts), device.total).total
    except CannotRun:
        return None
    return taken if device.free is None or taken <= device.free else None


def _drafts(draft: KnownDraft | None) -> list[_Draft]:
    return [] if draft is None else [_Draft(draft)]


def needed(target: KnownTarget, weights: str, draft: KnownDraft | None, device: Device) -> int:
    """Bytes of the weights, of working memory, and of a KV cache of ``TOKENS`` tokens."""
    model, drafts = target.shape.model(WEIGHTS[weights]), _drafts(draft)
    config, dtype = EngineConfig(), choose_dtype(EngineConfig(), model, device).value
    demand = Demand.of(config, dtype, model, drafts, packed=not device.is_gpu)
    return sum(demand.weights.values()) + demand.recordings + demand.kv_bytes(TOKENS)


def fitting(target: KnownTarget, draft: KnownDraft | None, device: Device) -> str | None:
    """The first of ``WEIGHTS`` that fits, with a KV cache of ``TOKENS`` tokens; None if none does."""
    drafts, least = _drafts(draft), EngineConfig(max_model_len=TOKENS, kv_tokens=TOKENS)
    models = ((weights, target.shape.model(how)) for weights, how in WEIGHTS.items())
    return next((weights for weights, model in models if _planned(device, model, drafts, least) is not None), None)


def flags(
    target: KnownTarget, weights: str, draft: KnownDraft | None, device: Device, least: int = TOKENS
) -> list[str] | None:
    """Flags for ``foresay serve`` so that the target fits, with the longest possible context. None if even ``least``
    tokens are too many."""
    model, drafts = target.shape.model(WEIGHTS[weights]), _drafts(draft)
    for settings in _lengths(model.max_positions, least):
        config = msgspec.structs.replace(EngineConfig(), **settings)
        if _planned(device, model, drafts, config) is not None:
            words = [] if draft is None else ["--draft", draft.setting]
            if (how := WEIGHTS[weights]) is not None and target.id != target.gguf:  # such files have few bits already
                words += ["--quantize", how]
            named = {f"--{name.replace('_', '-')}": str(tokens) for name, tokens in settings.items()}
            return [*words, *(word for flag in named.items() for word in flag)]
    return None


def _lengths(longest: int, least: int) -> Iterator[dict[str, int]]:
    """Settings from the defaults down to the shortest context; each length first for as many texts at once as there is
    room for, then for one."""
    yield {}
    yield {"kv_tokens": longest}
    length = 1 << (longest - 1).bit_length() - 1
    while length >= least:
        yield {"max_model_len": length}
        yield {"kv_tokens": length}
        length //= 2


# -- what is shown ----------------------------------------------------------------------------------------------------

#: What is said of a target by the first format that fits.
_FITS = {"bf16": "fits", "int8": "fits in int8", "int4": "fits in int4", None: "does not fit"}
_HEAD = ("GiB of memory in", *WEIGHTS, "")


def show(name: str | None) -> None:
    """Print all targets, or those that ``name`` means."""
    device, targets = here(), _named(name) if name else list(catalog.known_targets().values())
    print(f"This machine: {_title(device)}.\n")
    if len(targets) == 1:
        _show_one(targets[0], device)
    else:
        _show_all(targets, device)


def _named(name: str) -> list[KnownTarget]:
    """The target with this name, else all whose name contains it."""
    if (found := find_target(name)) is not None:
        return [found]
    if partly := [one for id, one in catalog.known_targets().items() if name.lower() in id.lower()]:
        return partly
    advice = f"foresay check {shlex.quote(name)} looks at any other model"
    raise ConfigurationError(f"NAME {name}: not in the catalog, which foresay models lists; {advice}")


def _show_all(targets: Sequence[KnownTarget], device: Device) -> None:
    """Print all targets, the smallest first."""
    rows = [_row(("* " if on_disk(target) else "  ") + _name(target), target, None, device) for target in targets]
    rows.sort(key=lambda row: float(row[1]))
    print("\n".join(aligned([_HEAD, *rows], right=range(1, 4))))
    print(f"\n*: on disk. {_MEMORY}\nforesay models NAME: what drafts for it, how to serve it.")


def _row(name: str, target: KnownTarget, draft: KnownDraft | None, device: Device) -> tuple[str, ...]:
    """One line: the memory in each format, and which fits first."""
    memory = (f"{needed(target, weights, draft, device) / (1 << 30):.1f}" for weights in WEIGHTS)
    return (name, *memory, _FITS[fitting(target, draft, device)])


_MEMORY = f"Memory: weights, working space, and a KV cache\nof {TOKENS:,} tokens."


def _title(device: Device) -> str:
    free = device.total if device.free is None else device.free
    return f"{device.model or 'CPU'}, {bytes_in_words(free)} of {bytes_in_words(device.total)} of memory free"


def _name(target: KnownTarget) -> str:
    """The name for people, short name first if there is one."""
    return f"{target.short} ({target.id.rpartition('/')[2]})" if target.short else target.id


def _show_one(target: KnownTarget, device: Device) -> None:
    """Print its memory alone and with each draft, and commands to copy."""
    directory = on_disk(target)
    print(f"{_name(target)}: {count_in_words(target.parameters)} weights, {target.shape.max_positions:,} tokens")
    print(f"on disk: {bytes_in_words(_size(directory))}\n" if directory else "not on disk yet\n")
    drafts = ((f"with {draft.id}", draft) for draft in target.drafts)
    rows = [_row(name, target, draft, device) for name, draft in (("alone", None), *drafts)]
    print("\n".join(aligned([_HEAD, *rows], right=range(1, 4))))
    if not target.drafts:
        heads = heads_in(BUNDLED / target.short) if target.short else ()
        print(f"Drafts that need no download: {', '.join((*heads, SUFFIX))}.")
    print(f"\n{_MEMORY}\n")
    _show_commands(target, device)


def _size(directory: Path) -> int:
    """Bytes of a file, or of all files of a directory."""
    files = [directory] if directory.is_file() else [file for file in directory.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _show_commands(target: KnownTarget, device: Device) -> None:
    """Print commands with the first draft if both fit, else without, else that it does not fit."""
    here = on_disk(target) is not None
    for draft in (*target.drafts[:1], None):
        if (weights := fitting(target, draft, device)) is not None:
            name, wanted = target.short or target.id, flags(target, weights, draft, device)
            print("Serve it:" if here and not draft else "Fetch it and serve it:")
            if not here or draft:
                print(f"  foresay pull {name}{' --draft' if draft else ''}")
            print(f"  {shlex.join(['foresay', 'serve', name, *(wanted or ())])}")
            return
    print("It does not fit this device, not even in int4; foresay models lists those that do.")
