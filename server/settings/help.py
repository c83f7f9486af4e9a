"""What ``--help``, the settings' page and error messages say about each setting: the text below its field in
:mod:`foresay.server.settings.config`.

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
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple, cast

from foresay.server.settings import config

#: Who applies a setting: the engine; the engine, whose text it may change; the server's routes; or each replica, in
#: addition to the engine's.
AppliedBy = Literal["engine", "text", "service", "cluster"]

_HEAD = re.compile(r"(?:([A-Z]+)\b ?)?(?:\((text|cluster|secret)\))?: ")
_HEADING = re.compile(r"^    # (\w+)\n", re.MULTILINE)


class About(NamedTuple):
    """What is known of a setting besides its field. secret: its value is never shown."""

    description: str
    group: str
    metavar: str | None = None
    by: AppliedBy | None = None
    secret: bool = False


@cache
def about_settings() -> dict[str, About]:
    """All settings, by name."""
    source = inspect.getsource(config)
    headings = {source.count("\n", 0, one.end()) + 1: one[1] for one in _HEADING.finditer(source)}
    found, group = dict[str, About](), ""
    for owner in ast.parse(source).body:
        for field, below in pairwise(owner.body if isinstance(owner, ast.ClassDef) else ()):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    group = headings.get(field.lineno, group)
                    found[name] = _about(" ".join(text.split()), group)
    return found


def _about(text: str, group: str) -> About:
    head = _HEAD.match(text)
    if head is None:
        return About(text, group)
    metavar, mark = head.groups()
    by = None if mark == "secret" else cast("AppliedBy | None", mark)
    return About(text[head.end() :], group, metavar, by, mark == "secret")
