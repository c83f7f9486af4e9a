"""Reading a config from flags, ``FORESAY_*`` variables and a TOML file, and remembering where each value came from.

The order is flag, variable, file, default; in the file ``[models.NAME]`` overrides ``[engine]``. An unknown name is an
error that says where it was found; a wrong value is an error that names the field and the valid values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from foresay.server.settings.config import SECTIONS, EngineConfig, ServeConfig
from foresay.server.settings.fields import PREFIX, Setting, all_settings, settings_of
from foresay.server.settings.resolved import LATEST
from foresay.spec.errors import ConfigurationError

FILE_VARIABLE = PREFIX + "CONFIG"
#: The section of a file with a subsection for each model of a server.
MODELS = "models"
#: Valid names of models: they appear in URLs, headers and log lines.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")

ConfigT = TypeVar("ConfigT", bound=EngineConfig)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ConfigT]):
    """A config and, for each field that is not at its default, where the value was found."""

    config: ConfigT
    origins: dict[str, str] = field(default_factory=dict)


def load(
    config: type[ConfigT],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    file: str | None = None,
    given_as: str = "flag",
) -> Loaded[ConfigT]:
    """Build ``config`` from explicit values, variables, a TOML file and its defaults.

    given: values by field name, already parsed or as text. file: the TOML file; None looks at ``FORESAY_CONFIG``.
    given_as: ``"flag"`` or ``"argument"``, how messages speak of ``given``. Raises :class:`ConfigurationError`.
    """
    document = _Document.read(file or environ.get(FILE_VARIABLE) or None)
    around = [*_from_environment(environ), *_from_caller(given, settings_of(config), given_as)]
    loaded = _built(config, [*document.settings(), *around])
    models = {name: _built(ServeConfig, [*document.settings(name), *around]).config for name in document.models}
    if not isinstance(loaded.config, ServeConfig):
        return loaded
    if models:
        _check_no_other_target(document.path, around)
    with_models = msgspec.structs.replace(loaded.config, models=models)
    check_models(with_models)
    return Loaded(with_models, loaded.origins)


def _check_no_other_target(path: str, sources: Iterable[tuple[str, Any, str]]) -> None:
    """Refuse a target from elsewhere: it would be the target of all models."""
    for name, value, _ in sources:
        if name == "target":
            raise ConfigurationError(f"the target {value} is given, and {path} names several in [models.NAME]")


def _built(config: type[ConfigT], sources: Iterable[tuple[str, Any, str]]) -> Loaded[ConfigT]:
    """The config made of the values of ``sources``; later ones override earlier ones."""
    known = settings_of(config)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value, origin in sources:
        if name in known:
            values[name] = _converted(known[name], value, origin)
            origins[name] = origin
    built = config(**values)
    check(built)
    return Loaded(built, origins)


def changed(config: ConfigT, settings: Mapping[str, Any], known: Mapping[str, Setting] | None = None) -> ConfigT:
    """``config`` with other settings, by name. known: the settings that may change; by default the engine's. Raises
    :class:`ConfigurationError`."""
    known = settings_of(EngineConfig) if known is None else known
    values = {name: _converted(known[name], value, name) for name, value, _ in _from_caller(settings, known, "setting")}
    made = msgspec.structs.replace(config, **values)
    check(made)
    return made


@dataclass(frozen=True, slots=True)
class _Document:
    """A settings file. tables: its sections. models: those of ``[models.NAME]``."""

    path: str = ""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | None) -> _Document:
        """The file at ``path``; an empty document without one."""
        if path is None:
            return cls()
        text = _read(path)
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{path} is not valid TOML: {error}") from None
        models = tables.pop(MODELS, {})
        for section, table in tables.items():
            if section not in SECTIONS or not isinstance(table, dict):
                sections = ", ".join(f"[{section}]" for section in (*SECTIONS, f"{MODELS}.NAME"))
                raise ConfigurationError(f'{path}: unknown section "{section}"; the sections are {sections}')
        _check_models(path, models)
        return cls(path, tables, models)

    def settings(self, model: str | None = None) -> Iterator[tuple[str, Any, str]]:
        """Name, value and location of each setting; those of one model come last."""
        for section, table in self.tables.items():
            yield from self._of(section, section, table)
        if model is not None:
            yield from self._of(f"{MODELS}.{model}", "engine", self.models[model])

    def _of(self, section: str, kind: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        for key, value in table.items():
            if key not in all_settings() or all_settings()[key].section != kind:
                raise ConfigurationError(f'{self.path}: unknown key "{key}" in [{section}]')
            yield key, value, f"{self.path} [{section}]"


def _check_models(path: str, models: Any) -> None:
    """Raise unless each is a table under a valid name, and no two names are the same to Ollama's clients."""
    if not isinstance(models, dict):
        raise ConfigurationError(f"{path}: models holds sections such as [models.NAME]")
    called: dict[str, str] = {}
    for name, table in models.items():
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{path}: {name[:80]!r} cannot be a model's name: it is 1 to 128 letters, digits and . _ : / @ + -, "
                "a letter or digit first (in the file, put a name with characters other than _ and - in quotes)"
            )
        if not isinstance(table, dict):
            raise ConfigurationError(f"{path}: [models.{name}] must be a section with keys such as target")
        if called.setdefault(name.removesuffix(LATEST), name) != name:
            raise ConfigurationError(f"{path}: {name} and {called[name.removesuffix(LATEST)]} are one name to Ollama")


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"cannot read the config file {path}: {reason}") from None


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    variables = {setting.variable: name for name, setting in all_settings().items()}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE or environ[variable] == "":
            continue
        if variable not in variables:
            raise ConfigurationError(f"unknown environment variable {variable}")
        yield variables[variable], environ[variable], variable


def _from_caller(given: Mapping[str, Any], known: Mapping[str, Setting], form: str) -> Iterator[tuple[str, Any, str]]:
    for name, value in given.items():
        if name not in known:
            raise ConfigurationError(f'unknown {form} "{name}"')
        yield name, value, known[name].flag if form == "flag" and name != "target" else name


def _converted(setting: Setting, value: Any, origin: str) -> Any:
    if setting.is_list and isinstance(value, str):
        value = [value]
    try:
        return msgspec.convert(value, setting.kind, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        named = origin in (setting.flag, setting.variable, setting.name)
        subject = origin if named else f"{origin}: {setting.name}"
        got = "; what was given is not repeated here" if setting.is_secret else f", got {value!r}"
        raise ConfigurationError(f"{subject} must be {setting.expected}{got}") from None


# -- settings that are each valid but do not fit together --------------------------------------------------------------


def check(config: EngineConfig) -> None:
    """Raise :class:`ConfigurationError` for settings that are each valid but do not fit together."""
    if isinstance(config, ServeConfig):
        _check_server(config)
    if config.max_model_len is not None and config.kv_tokens is not None and config.kv_tokens < config.max_model_len:
        raise ConfigurationError(
            f"kv_tokens ({config.kv_tokens}) must be at least max_model_len ({config.max_model_len}), "
            "or a single long request could never be served"
        )


def _check_server(config: ServeConfig) -> None:
    if config.idle_seconds == 0:
        raise ConfigurationError("idle_unload must be above 0; leave it out to keep the model")
    if (config.ssl_certfile is None) != (config.ssl_keyfile is None):
        missing = "ssl_certfile" if config.ssl_certfile is None else "ssl_keyfile"
        raise ConfigurationError(f"HTTPS needs a certificate and its key: {missing} is not set")
    if len(set(config.api_key)) < len(config.api_key):
        raise ConfigurationError("the same api_key is given twice")
    if len(set(config.served_model_name)) < len(config.served_model_name):
        raise ConfigurationError("the same served_model_name is given twice")
    _check_replicas(config)
    limit, longest = config.max_output_tokens, config.max_model_len
    if limit is not None and longest is not None and limit >= longest:
        raise ConfigurationError(f"max_output_tokens ({limit}) must be below max_model_len ({longest})")


def _check_replicas(config: ServeConfig) -> None:
    if config.replicas is None:
        if config.ray_address is not None:
            raise ConfigurationError("ray_address is where replicas run, but there are none: set --replicas")
        return
    least, _, most = config.replicas.partition("-")
    if most and int(most) < int(least):
        raise ConfigurationError(f"replicas ({config.replicas}) must name the least first, then the most")
    if config.idle_unload is not None:
        raise ConfigurationError("idle_unload ends an engine: with --replicas say how many, such as --replicas 1-4")


def check_models(config: ServeConfig) -> None:
    """Raise :class:`ConfigurationError` for models of one server that are each valid but do not fit together."""
    if not config.models:
        if config.max_loaded_models is not None:
            raise ConfigurationError("max_loaded_models is for several models, but no [models.NAME] names any")
        return
    if config.replicas is not None:
        raise ConfigurationError("replicas serve one model: --replicas cannot be combined with [models.NAME]")
    if config.served_model_name:
        raise ConfigurationError("served_model_name is for one model; several are named by [models.NAME]")
