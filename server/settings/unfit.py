"""The error for settings and models that do not fit together, with what would mend it kept apart."""

from __future__ import annotations

from spec.errors import ConfigurationError


class Unfit(ConfigurationError):
    """fault: what is wrong. remedy: what would be right, without a full stop. The message is both."""

    def __init__(self, fault: str, remedy: str) -> None:
        super().__init__(f"{fault}: {remedy}")
        self.fault, self.remedy = fault, remedy
