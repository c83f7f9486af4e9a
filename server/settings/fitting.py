"""Settings that are each valid but do not fit together. Does not import torch."""

from __future__ import annotations

from foresay.server.settings.config import USUAL_TOKENS, EngineConfig, SamplingConfig, ServeConfig
from foresay.spec.errors import ConfigurationError
from foresay.spec.names import SUFFIX


def check(config: EngineConfig) -> None:
    """Raise :class:`ConfigurationError` for settings that are each valid but do not fit together."""
    if isinstance(config, ServeConfig):
        _check_server(config)
    if isinstance(config, SamplingConfig) and config.min_tokens > (config.max_tokens or USUAL_TOKENS):
        most = config.max_tokens or f"{USUAL_TOKENS}, unless it is set"
        raise ConfigurationError(f"min_tokens ({config.min_tokens}) must be at most max_tokens ({most})")
    if config.draft_history is not None and not {SUFFIX, "auto"} & {part.strip() for part in config.draft.split(",")}:
        raise ConfigurationError(
            f"draft_history is what the suffix drafter remembers, but draft is {config.draft}: set --draft suffix, or "
            "leave --draft-history out"
        )
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
    if config.draft_history is not None:
        raise ConfigurationError("draft_history is a file written by one engine: it cannot be combined with --replicas")
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
    _check_own_files(config.models)


def _check_own_files(models: dict[str, ServeConfig]) -> None:
    """Refuse a file that two models would write to: both may be loaded at once."""
    users: dict[str, str] = {}
    for name, config in models.items():
        file = config.draft_history
        if file is not None and users.setdefault(file, name) != name:
            raise ConfigurationError(
                f"the models {users[file]} and {name} would both write to {file}: set draft_history in each section"
            )
