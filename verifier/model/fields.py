"""A JSON object read as configuration: typed values by name, with errors that name the key and the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.verifier.model.errors import ConfigError

#: Counts are sizes of tensors or positions in texts, for which kernels use 32 bits.
LARGEST = (1 << 31) - 1
#: Real values are used in float32.
LARGEST_FLOAT = 3e38


def _short(value: Any) -> str:
    """A value for a message, without the middle of a long one."""
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 128 else "a larger one"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-12:]}"


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and its location. A key that is null counts as absent; a key without default is required."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def read(cls, path: Path) -> Fields:
        """The JSON object in the file ``path``."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a JSON object")
        return cls(values, str(path))

    def error(self, message: str) -> ConfigError:
        """A ConfigError with the location."""
        return ConfigError(f"{self.where}: {message}")

    def get(self, key: str) -> Any:
        """The raw value, None if absent."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, most: int = LARGEST) -> int:
        """A whole number from ``minimum`` to ``most``."""
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= most:
            raise self.error(f"{key} must be a whole number from {minimum} to {most}, got {_short(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number in float32's range."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_FLOAT:
            raise self.error(f"{key} must be a positive number of at most {LARGEST_FLOAT:g}, got {_short(value)}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive number, None if absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def refuse(self, *keys: str) -> None:
        """Raise ConfigError if one of these, which would change what is computed, is neither false nor null."""
        for key in keys:
            if self.get(key):
                raise self.error(f"{key} is not supported")

    def shares(self, key: str) -> list[float]:
        """Numbers from 0 to 1, at least one."""
        value = self._value(key, None)
        each = value if isinstance(value, list) else []
        if not each or not all(type(share) in (int, float) and 0 <= share <= 1 for share in each):
            raise self.error(f"{key} must be a list of numbers from 0 to 1, got {_short(value)}")
        return [float(share) for share in each]

    def section(self, key: str) -> Fields | None:
        """A nested object, None if absent or empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} must be an object, got {value!r}")
        return Fields(value, f"{self.where}, {key}") if value else None

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None and default is None:
            raise self.error(f"{key} is missing")
        return default if value is None else value
