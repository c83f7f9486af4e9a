"""Receipts of :mod:`foresay.server.cli.prove`: what a model wrote, what that depends on, and where two differ."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import msgspec

from foresay.spec.errors import ConfigurationError

#: What ``--check`` takes instead of a file, and where the receipts of known models are.
KNOWN, RECEIPTS = "known", Path(__file__).parents[1] / "catalog" / "receipts"
#: The way that all others are compared with.
PLAIN = "plain"
#: Gives the text of token ids.
Decode = Callable[[list[int]], str]


class FirstDifference(NamedTuple):
    """The first difference between two lists of answers. prompt: its index. one, other: the tokens there; None: the
    answer ends."""

    prompt: int
    position: int
    one: int | None
    other: int | None


class Proved(msgspec.Struct, kw_only=True):
    """A case. where: each prompt's source. prompts, tokens: ids of each. ways: by name, how many tokens were drafted in
    it, and accepted. differs: by way, where it first differs from plain decoding."""

    name: str
    where: list[str]
    prompts: list[list[int]]
    tokens: list[list[int]]
    sha256: str
    ways: dict[str, tuple[int, int]]
    differs: dict[str, FirstDifference] = {}


class Receipt(msgspec.Struct, kw_only=True):
    """What a model wrote, and what that depends on. exact: whether it claims to be, and why. max_tokens: of an answer.
    sha256: of all cases, questions included."""

    foresay: str
    target: str
    fingerprint: str
    identity: dict[str, str]
    exact: bool
    exact_reason: str
    max_tokens: int
    cases: list[Proved]
    sha256: str


def of_all(cases: Sequence[Proved]) -> str:
    """The digest of all cases, with their questions."""
    return sha256([(case.name, sha256(case.prompts), case.sha256) for case in cases])


def difference(ones: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> FirstDifference | None:
    """Where two lists of answers differ first; None if they are the same."""
    for prompt, (one, other) in enumerate(zip(ones, others, strict=True)):
        for position, (here, there) in enumerate(zip_longest(one, other)):
            if here != there:
                return FirstDifference(prompt, position, here, there)
    return None


def sha256(value: object) -> str:
    """A digest of token ids, or of digests."""
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()


def table(receipt: Receipt, decode: Decode) -> Iterator[str]:
    """A line for each case, for what differs, for all, and for what they depend on."""
    for case in receipt.cases:
        size, ways = sum(map(len, case.tokens)), len(case.ways)
        end = f"in {len(case.differs)} of {ways} ways another text" if case.differs else f"the same in {ways} ways"
        yield f"{case.name:<10} {len(case.tokens):>3} answers {size:>5} tokens  {case.sha256[:16]}  {end}"
        for way, found in case.differs.items():
            where, here, there = case.where[found.prompt], _token(found.other, decode), _token(found.one, decode)
            yield f"  {way}: {where}, output token {found.position + 1} is {here}; plain decoding has {there}"
    total = sum(len(case.tokens) for case in receipt.cases)
    yield f"{'all':<10} {total:>3} answers {' ' * 13} {receipt.sha256}"
    for way in receipt.cases[0].ways if receipt.cases else ():
        drafted, accepted = (sum(each) for each in zip(*(case.ways[way] for case in receipt.cases), strict=True))
        if drafted or way != PLAIN:
            figures = f"{drafted} drafted, {accepted} accepted"
            yield f"  {way}: {figures if drafted else 'drafted nothing, so nothing of it is proved'}"
    yield f"{receipt.fingerprint}: " + "; ".join(f"{name} {_short(value)}" for name, value in receipt.identity.items())
    if any(case.differs for case in receipt.cases):
        yield (
            "This engine claims to be exact: that is a fault of Foresay, please report it."
            if receipt.exact
            else f"This engine does not claim to be exact: {receipt.exact_reason}."
        )


def compared(receipt: Receipt, given: Receipt, decode: Decode) -> Iterator[str]:
    """What to say of another receipt."""
    unlike = [
        f"{part}: {_short(receipt.identity.get(part, '-'))} here, {_short(given.identity.get(part, '-'))} there"
        for part in dict.fromkeys((*receipt.identity, *given.identity))
        if receipt.identity.get(part) != given.identity.get(part)
    ]
    if receipt.sha256 == given.sha256:
        yield f"The receipt of {given.target} has the same texts, token for token."
    else:
        where, asked = _first(receipt, given, decode)
        yield f"The receipt of {given.target} differs: {where}."
        if asked and not unlike and receipt.exact and given.exact:
            yield "The fingerprints are the same, so the texts should be: please report it."
    if unlike:
        yield f"The fingerprints differ ({receipt.fingerprint} here, {given.fingerprint} there) in {'; '.join(unlike)}."


def _first(receipt: Receipt, given: Receipt, decode: Decode) -> tuple[str, bool]:
    """Where they differ first, and whether that is an answer to the same question."""
    theirs = {case.name: case for case in given.cases}
    for case in receipt.cases:
        other = theirs.get(case.name)
        if other is None or len(other.prompts) != len(case.prompts):
            return f"it has no such case as {case.name!r}, or other prompts in it", False
        for where, one, two in zip(case.where, case.prompts, other.prompts, strict=True):
            if one != two:
                return f"{case.name}, {where} is {len(one)} tokens here and {len(two)} there: other questions", False
        if (found := difference(case.tokens, other.tokens)) is not None:
            here, there = _token(found.one, decode), _token(found.other, decode)
            where = case.where[found.prompt]
            return f"{case.name}, {where}, output token {found.position + 1} is {here} here and {there} there", True
    return f"it has further cases ({', '.join(set(theirs) - {case.name for case in receipt.cases})})", False


def _token(id: int | None, decode: Decode) -> str:
    return "missing" if id is None else f"{id} {decode([id])!r}"


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 and " " not in value else value


def write(path: Path, receipt: Receipt) -> None:
    """Store a receipt, a line for each case. Raises ConfigurationError if that is not possible."""
    try:
        path.write_bytes(msgspec.json.encode(receipt).replace(b'{"name":', b'\n{"name":') + b"\n")
    except OSError as error:
        raise ConfigurationError(f"--out {path}: cannot be written ({error.strerror})") from None


def read(path: Path) -> Receipt:
    """A stored receipt. Raises ConfigurationError for anything else."""
    try:
        receipt = msgspec.json.decode(path.read_bytes(), type=Receipt)
    except OSError as error:
        raise ConfigurationError(f"--check {path}: cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"--check {path}: not a receipt of foresay prove --out ({error})") from None
    for case in receipt.cases:
        if len(case.tokens) != len(case.prompts) or case.sha256 != sha256(case.tokens):
            raise ConfigurationError(f"--check {path}: damaged, the tokens of {case.name} are not those of its sha256")
    if receipt.sha256 != of_all(receipt.cases):
        raise ConfigurationError(f"--check {path}: damaged, its cases are not those of its sha256")
    return receipt


def known(target: str, weights: str) -> Receipt:
    """The receipt that ships for these weights. Raises ConfigurationError if there is none."""
    receipts = [read(path) for path in sorted(RECEIPTS.glob("*.json"))]
    found = next((one for one in receipts if one.identity.get("weights") == weights), None)
    if found is None:
        names = ", ".join(one.target for one in receipts)
        raise ConfigurationError(f"--check {KNOWN}: no receipt ships for {target} (only for {names})")
    return found
