"""What ``foresay check`` finds, as records; printed for people by :mod:`server.cli.check.show`, as JSON as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from server.engine.device import Device
from server.settings.resolved import Resolved
from server.settings.unfit import Unfit
from spec.acceptance import ByDepth
from spec.errors import ForesayError
from verifier.model.config import ModelConfig

Status = Literal["ok", "warn", "fail"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Target:
    """A target whose configuration could be read. name: as it was given. device: where it would run."""

    name: str
    directory: Path
    model: ModelConfig
    dtype: Resolved
    device: Device


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at. fix: a sentence on what would mend it, for all but ``ok``. facts: in numbers."""

    subject: str
    status: Status
    text: str
    fix: str = ""
    facts: dict[str, Any] = {}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The pair at one temperature. Speeds in tokens per second; spread: the least and the greatest speed-up.

    runs: texts written both ways. same_tokens: whether both ways wrote the same in all of them. propose_share: of the
    time of a step, what drafting took.
    """

    temperature: float
    runs: int
    tokens: int
    speedup: float
    spread: tuple[float, float]
    drafted_speed: float
    plain_speed: float
    tokens_per_step: float
    propose_share: float
    accepted_by_depth: ByDepth
    same_tokens: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. works: nothing failed. probe: what was measured, by temperature, if it was asked for.

    recommended: what is known to draft well for the target, where nothing of the kind was asked for or it does not fit.
    """

    target: str
    draft: str
    works: bool
    verdict: str
    findings: list[Finding]
    probe: list[Measured] = []
    recommended: str = ""


class Notes:
    """Gathers findings, so that everything wrong is told and not only the first thing."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def ok(self, subject: str, text: str, **facts: Any) -> None:
        """Something is as it should be."""
        self.findings.append(Finding(subject=subject, status="ok", text=text, facts=facts))

    def warn(self, subject: str, text: str, fix: str, **facts: Any) -> None:
        """It works, but not well."""
        self.findings.append(Finding(subject=subject, status="warn", text=text, fix=_sentence(fix), facts=facts))

    def fail(self, subject: str, text: str, fix: str, **facts: Any) -> None:
        """It cannot work."""
        self.findings.append(Finding(subject=subject, status="fail", text=text, fix=_sentence(fix), facts=facts))

    def attempt(self, subject: str, fix: str, read: Callable[[], T]) -> T | None:
        """What ``read`` returns; None, and a fault, if it raises one of Foresay's errors.

        fix: for errors that do not bring their own.
        """
        try:
            return read()
        except Unfit as error:
            self.fail(subject, error.fault, error.remedy)
        except ForesayError as error:
            self.fail(subject, " ".join(str(error).split()), fix)
        return None

    def doubted(self, *subjects: str) -> bool:
        """Whether anything in these subjects failed, or is not as it should be."""
        return any(finding.status != "ok" and finding.subject in subjects for finding in self.findings)

    def failed(self, *subjects: str) -> bool:
        """Whether anything failed, in these subjects if any are named."""
        return any(
            finding.status == "fail" and (not subjects or finding.subject in subjects) for finding in self.findings
        )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
