"""The steps of the three calls, in order, and how long each may take: ``quarter_hour.sh A --plan`` prints it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Seconds of a call; of these for its report; and by how much a step may exceed its end.
CALLS, REPORT, GRACE = {"A": 200, "B": 280, "C": 200}, 5, 5.0


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


#: Every call begins with these, and every part of one: they say how kernels are launched, and what a floor is.
FIRST = (
    Step("card", "smoke:card", 12, alone=True),
    Step("smoke", "smoke:smoke", 6, alone=True),
    Step("bandwidth", "smoke:bandwidth", 5),
)
#: Published models of which some layers are measured (:data:`bench.hybrids.STACKS`); small ones that write texts.
_STACKS = ("Qwen3-30B-A3B", "gpt-oss", "GLM-4.7-Flash", "Qwen3.5-9B")
_HYBRIDS = ("experts", "latents", "Gated DeltaNet", "Mamba-2")


def _compile(*names: str) -> list[Step]:
    return [Step(f"compile {name}", "steps:compile_ahead", 60, background=True) for name in names]


STEPS = {
    "A": (
        *FIRST,
        *_compile("8B passes", "8B steps", "1B passes", "1B steps", "8B prompts", *(f"ablation {n}" for n in range(3))),
        Step("same tokens", "steps:same", 66),
        Step("8B passes", "steps:passes", 20, quiet=True),
        Step("8B steps", "steps:whole", 16, quiet=True),
        Step("1B passes", "steps:passes", 13, quiet=True),
        Step("1B steps", "steps:whole", 13, quiet=True),
        Step("8B prompts", "steps:prompts", 4, quiet=True),
        Step("ablation", "steps:ablation", 20, quiet=True),
        Step("profile", "profile:profile", 20, quiet=True),
    ),
    "B": (
        *FIRST,
        *(Step(f"hybrid {name}", "bench.hybrids:same", 140, background=True) for name in _HYBRIDS),
        Step("kernel tests", "commands:kernel_tests", 140, background=True),
        *(Step(f"generate {draft}", "commands:generate", 140, background=True) for draft in ("auto", "none")),
        Step("built", "commands:built", 142, quiet=True),
        Step("serve", "commands:serve", 35, quiet=True),
        Step("auto and suffix", "profile:engines", 40, quiet=True),
        Step("bench", "commands:bench", 30, quiet=True),
    ),
    "C": (
        *FIRST,
        *_compile("Qwen3-8B steps", "8B int8", "8B int4", *(f"stack {name}" for name in _STACKS), "kernels"),
        Step("sanitizer", "commands:sanitized", 40),
        Step("Qwen3-8B steps", "steps:whole", 45, quiet=True),
        *(Step(f"8B {kind}", "steps:passes", 8, quiet=True) for kind in ("int8", "int4")),
        *(Step(f"stack {name}", "bench.hybrids:stack", 9, quiet=True) for name in _STACKS),
        Step("kernels", "kernels:kernels", 30, quiet=True),
    ),
}


def chosen(call: str, names: Sequence[str]) -> list[Step]:
    """The first steps of a call, and those further ones that begin with one of the names."""
    return [*FIRST, *(step for step in STEPS[call][len(FIRST) :] if step.name.startswith(tuple(names)))]


def ends(steps: Sequence[Step]) -> list[float]:
    """When each step should have ended, in seconds since the call began; one in the background when it must have."""
    front = accumulate(0.0 if step.background else step.seconds for step in steps)
    return [end + step.seconds if step.background else end for step, end in zip(steps, front, strict=True)]


def total(call: str) -> float:
    """Seconds of a call, as planned."""
    return ends(STEPS[call])[-1] + REPORT


def shown(call: str) -> str:
    """The schedule of a call, and the sum of all."""
    rows = [f"call {call}, at most {CALLS[call]} s", " from    to  step"]
    for step, end in zip(STEPS[call], ends(STEPS[call]), strict=True):
        notes = ", ".join(word for word in ("background", "alone", "quiet") if getattr(step, word))
        rows.append(f"{end - step.seconds:5.0f} {end:5.0f}  {step.name}{f' ({notes})' if notes else ''}")
    sums = ", ".join(f"{each} {total(each):.0f} s" for each in CALLS)
    rows.append(f"{total(call) - REPORT:5.0f} {total(call):5.0f}  report")
    return "\n".join([*rows, f"sum: {sums}, together {sum(map(total, CALLS)):.0f} s"])
