"""The settings of :mod:`foresay.server.settings.config` as data: each with its flag, variable, section, accepted
values, and what ``--help``, the settings' page and error messages say of it: the text below its field.

::

    # access                                 the heading of this field and those that follow
    api_key: tuple[SecretKey, ...] = ()
    '''KEY (secret): a key that ...'''      what stands for its value, a mark, and the description

The marks: ``secret``, whose value is never shown; otherwise who applies it, where that is not as usual in its section.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_type_hints

import msgspec

from foresay.server.settings import config
from foresay.server.settings.config import SECTIONS, EngineConfig, ServeConfig

#: Who applies a setting: the engine; the engine, whose text it may change; the server's routes; or each replica, in
#: addition to the engine's.
AppliedBy = Literal["engine", "text", "service", "cluster"]

_HEAD = re.compile(r"(?:([A-Z]+)\b ?)?(?:\((text|cluster|secret)\))?: ")
_HEADING = re.compile(r"^    # (\w+)\n", re.MULTILINE)


@cache
def about_settings() -> dict[str, dict[str, Any]]:
    """What is known of each setting besides its field, as fields of :class:`Setting`, by name."""
    source = inspect.getsource(config)
    headings = {source.count("\n", 0, one.end()) + 1: one[1] for one in _HEADING.finditer(source)}
    found, group = dict[str, dict[str, Any]](), ""
    for owner in ast.parse(source).body:
        for field, below in pairwise(owner.body if isinstance(owner, ast.ClassDef) else ()):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    group, text = headings.get(field.lineno, group), " ".join(text.split())
                    head = _HEAD.match(text)
                    metavar, mark = (None, None) if head is None else head.groups()
                    found[name] = {
                        "description": text[head.end() if head else 0 :],
                        "group": group,
                        "metavar": metavar,
                        "is_secret": mark == "secret",
                        **({"applied_by": mark} if mark not in (None, "secret") else {}),
                    }
    return found


PREFIX = "FORESAY_"
#: The most common settings: eight of a server.
_COMMON = {
    *("draft", "quantize", "max_model_len", "max_seqs", "served_model_name", "host", "port", "api_key"),
    *("temperature", "top_p", "max_tokens", "rounds"),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a config struct, with all its names. is_secret: its value is never shown."""

    name: str
    section: str
    kind: Any
    default: Any
    description: str
    group: str
    metavar: str | None
    expected: str
    is_switch: bool
    is_list: bool
    is_secret: bool
    applied_by: AppliedBy
    choices: tuple[str, ...]

    @property
    def is_common(self) -> bool:
        """Whether ``--help`` shows its flag; the others are shown by ``--help-all``."""
        return self.name in _COMMON

    @property
    def flag(self) -> str:
        """The command-line flag, such as ``--draft-tokens``."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, such as ``FORESAY_DRAFT_TOKENS``."""
        return PREFIX + self.name.upper()


@cache
def settings_of(config: type[EngineConfig]) -> dict[str, Setting]:
    """The settings of a config struct by field name, ancestors' fields first. Its models are not a setting: they have
    settings of their own."""
    hints = get_type_hints(config, include_extras=True)
    info = msgspec.inspect.type_info(config)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _setting(field, hints[field.name]) for field in info.fields if field.name != "models"}


@cache
def all_settings() -> dict[str, Setting]:
    """Every setting of every section by field name."""
    return {name: setting for config in SECTIONS.values() for name, setting in settings_of(config).items()}


def applied_by(*appliers: AppliedBy) -> tuple[str, ...]:
    """The settings of a server that these ``appliers`` apply."""
    return tuple(name for name, setting in settings_of(ServeConfig).items() if setting.applied_by in appliers)


def _setting(field: msgspec.inspect.Field, kind: Any) -> Setting:
    first = _plain_types(field.type)[0]
    section = next(name for name, owner in SECTIONS.items() if field.name in owner.__struct_fields__)
    return Setting(
        name=field.name,
        section=section,
        kind=kind,
        default=field.default,
        expected=_expected(field.type),
        is_switch=isinstance(first, msgspec.inspect.BoolType),
        is_list=isinstance(first, msgspec.inspect.VarTupleType),
        choices=tuple(map(str, first.values)) if isinstance(first, msgspec.inspect.LiteralType) else (),
        **{"applied_by": "engine" if section == "engine" else "service"} | about_settings()[field.name],
    )


def _plain_types(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """The alternatives of a type without None and without metadata."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return [plain for part in kind.types for plain in _plain_types(part)]
    if isinstance(kind, msgspec.inspect.Metadata):
        return _plain_types(kind.type)
    return [] if isinstance(kind, msgspec.inspect.NoneType) else [kind]


def _expected(kind: msgspec.inspect.Type) -> str:
    """A description of valid values."""
    match kind:
        case msgspec.inspect.Metadata(type=inner, extra=extra):
            return str((extra or {}).get("expected") or _expected(inner))
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(_expected(part) for part in types if not isinstance(part, msgspec.inspect.NoneType))
        case msgspec.inspect.IntType(ge=least, le=most):
            return "a whole number" + _range(least, None, most)
        case msgspec.inspect.FloatType(ge=least, gt=above, le=most):
            return "a number" + _range(least, above, most)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"a list, each item {_expected(item)}"
        case msgspec.inspect.StrType(min_length=1):
            return "text that is not empty"
        case _:
            return "text"


def _range(least: float | None, above: float | None, most: float | None) -> str:
    low = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    if most is None:
        return low
    if least is not None:
        return f" from {least:g} to {most:g}"
    return f"{low} and at most {most:g}" if low else f" of at most {most:g}"
