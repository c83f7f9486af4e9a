"""What Python code hands over, as the types that are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spec.errors import InvalidRequest

#: To msgspec these are texts in base64.
_AS_THEY_ARE = (bytes, bytearray, memoryview)


def typed(value: object, kind: Any, field: str) -> Any:
    """``value`` as a ``kind``, numpy's and torch's numbers as Python's; raises for any other type, naming the field."""
    try:
        return msgspec.convert(msgspec.to_builtins(value, builtin_types=_AS_THEY_ARE, enc_hook=_plain), kind)
    except msgspec.ValidationError as error:
        complaint = str(error).partition(" - at ")[0]
        raise InvalidRequest(field, f"{field}: {complaint[0].lower()}{complaint[1:]}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"{field}: {error}") from None


def _plain(value: Any) -> Any:
    """What msgspec does not know: an array, a tensor, one of their numbers, a range, an iterator, a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else list(value)
