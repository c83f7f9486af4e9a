"""HTTPS."""

from __future__ import annotations

import ssl

from server.settings.config import ServeConfig
from spec.errors import ConfigurationError


def context(config: ServeConfig) -> ssl.SSLContext | None:
    """What to listen with, TLS 1.2 or newer; None for plain HTTP. :class:`ConfigurationError` names the bad file."""
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    files = f"ssl_certfile ({config.ssl_certfile}) and ssl_keyfile ({config.ssl_keyfile})"
    try:
        made.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")  # never ask on the terminal
    except ssl.SSLError as error:
        raise ConfigurationError(f"{files} cannot be used: {error.reason or 'not a matching PEM pair'}") from None
    except OSError as error:
        raise ConfigurationError(f"{files} cannot be read: {error.strerror}") from None
    return made
