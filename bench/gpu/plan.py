"""The steps of the two calls, in order, and how long each may take: ``quarter_hour.sh A --plan`` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Seconds of a call; of these for its report; and by how much a step may exceed its end.
CALLS, REPORT, GRACE = {"A": 250, "B": 250}, 5, 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """function: of this package, ``module:function``, called with a :class:`~bench.gpu.worker.Task`. seconds: the
    expected ones; in the background: the most allowed. alone: in its own process, which ends with it. background: so
    too, and the next step does not wait. quiet: it waits for all in the background."""

    name: str
    function: str
    seconds: float
    alone: bool = False
    background: bool = False
    quiet: bool = False


_FIRST = (
    Step("card", "smoke:card", 8, alone=True),
    Step("smoke", "smoke:smoke", 18, alone=True),
    Step("bandwidth", "smoke:bandwidth", 4),
)


def _compile(*names: str) -> list[Step]:
    return [Step(f"compile {name}", "steps:compile_ahead", 60, background=True) for name in names]


STEPS = {
    "A": (
        *_FIRST,
        *_compile(
            "8B passes", "8B steps", "1B passes", "1B steps", "8B prompts", "ablation 0", "ablation 1", "ablation 2"
        ),
        Step("same tokens", "steps:same", 70),
        Step("8B passes", "steps:passes", 22, quiet=True),
        Step("8B steps", "steps:whole", 23, quiet=True),
        Step("1B passes", "steps:passes", 15, quiet=True),
        Step("1B steps", "steps:whole", 20, quiet=True),
        Step("8B prompts", "steps:prompts", 8, quiet=True),
        Step("ablation", "steps:ablation", 28, quiet=True),
        Step("profile", "profile:profile", 25, quiet=True),
    ),
    "B": (
        *_FIRST,
        Step("kernel tests", "commands:kernel_tests", 70, background=True),
        *(Step(f"generate {draft}", "commands:generate", 70, background=True) for draft in ("auto", "none")),
        Step("hybrids", "bench.hybrids:same", 70, background=True),
        *_compile("kernels"),
        Step("built", "commands:built", 70, quiet=True),
        Step("serve", "commands:serve", 35, quiet=True),
        Step("auto and suffix", "profile:engines", 40, quiet=True),
        Step("kernels", "kernels:kernels", 30, quiet=True),
        Step("bench", "commands:bench", 30, quiet=True),
    ),
}


def ends(steps: Sequence[Step]) -> list[float]:
    """When each step should have ended, in seconds since the call began; one in the background when it must have."""
    front = accumulate(0.0 if step.background else step.seconds for step in steps)
    return [end + step.seconds if step.background else end for step, end in zip(steps, front, strict=True)]


def total(call: str) -> float:
    """Seconds of a call, as planned."""
    return ends(STEPS[call])[-1] + REPORT


def shown(call: str) -> str:
    """The schedule of a call, and the sum of both."""
    rows = [f"call {call}, at most {CALLS[call]} s", " from    to  step"]
    for step, end in zip(STEPS[call], ends(STEPS[call]), strict=True):
        notes = ", ".join(word for word in ("background", "alone", "quiet") if getattr(step, word))
        rows.append(f"{end - step.seconds:5.0f} {end:5.0f}  {step.name}{f' ({notes})' if notes else ''}")
    sums = ", ".join(f"{each} {total(each):.0f} s" for each in CALLS)
    rows.append(f"{total(call) - REPORT:5.0f} {total(call):5.0f}  report")
    return "\n".join([*rows, f"sum: {sums}, together {sum(map(total, CALLS)):.0f} s"])
