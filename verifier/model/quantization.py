"""Which matrices of a model are quantised, and how: by ``--quantize``, or as described in config.json
(:mod:`foresay.verifier.model.quantization_config`).

The meaning of the numbers: :mod:`foresay.verifier.ops.quantized`. How files with each layout are read:
:mod:`foresay.verifier.model.weight_loader`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from math import prod

import regex

from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.names import stored_names

HEAD = "lm_head"
#: Groups that ``--quantize int4`` tries; rows that none of them divides become int8.
_GROUPS = (128, 64, 32)
#: A head's part of a matrix of latent attention, which files may have in few bits as a whole: a rule must name it.
_OF_A_HEAD = regex.compile(r"\.heads\.\d+\.[kv]_b_proj$")
#: How many numbers of a row the kernels process in a step.
_STEP = 8


class Format(StrEnum):
    """How files store a quantised matrix, by the names that configurations have for it."""

    MADE = "made"  # as floats: it is quantised here on loading
    PACKED = "pack-quantized"  # compressed-tensors: weight_packed, weight_scale, perhaps weight_zero_point
    INTEGERS = "int-quantized"  # compressed-tensors: weight of int8, weight_scale, perhaps weight_zero_point
    FLOATS8 = "float-quantized"  # compressed-tensors: weight of e4m3, weight_scale
    BLOCKS = "fp8"  # weight of e4m3, weight_scale_inv (or weight_scale) of blocks or of all
    GPTQ = "gptq"  # qweight, qzeros (stored less one), scales, g_idx
    GPTQ_V2 = "gptq_v2"  # the same with zeros as they are
    AWQ = "awq"  # qweight, qzeros, scales, with permuted outputs in a word
    MXFP4 = "mxfp4"  # gpt-oss: for all experts e2m1 codes (.._blocks) and powers of two (.._scales)
    MXFP4_PACKED = "mxfp4-pack-quantized"  # compressed-tensors: weight_packed, weight_scale, the same codes and scales
    NVFP4_PACKED = "nvfp4-pack-quantized"  # the same with scales of e4m3, which weight_global_scale divides
    MODELOPT = "modelopt"  # NVIDIA's: weight of codes, weight_scale of e4m3, their factor weight_scale_2
    GGUF = "gguf"  # blocks of llama.cpp's file (foresay.verifier.model.gguf.weights)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is quantised. group: numbers of a row that share a scale; None: all of them. symmetric: whether
    there are no zero points. span: numbers that share a step, of which scales are multiples; None:
    scales are not multiples. minimums: whether groups have these too. floats: whether numbers are e4m3, or with 4 bits
    e2m1, with 8-bit scales: e4m3 for 16 numbers, powers of two for 32. rows: that share a scale in the files; None:
    all. ordered: whether numbers of a row are assigned to groups in another order. ones: whether all multiples are one.
    """

    bits: int
    group: int | None
    symmetric: bool
    layout: Format
    span: int | None = None
    minimums: bool = False
    floats: bool = False
    rows: int | None = 1
    ordered: bool = False
    ones: bool = False

    @property
    def e2m1(self) -> bool:
        """Whether numbers are 4-bit floats."""
        return self.floats and self.bits == 4

    @property
    def plain_int8(self) -> bool:
        """Whether numbers are plain int8 with only scales."""
        return (self.bits, self.symmetric, self.layout, self.floats, self.rows) == (
            8,
            True,
            Format.INTEGERS,
            False,
            1,
        )

    def for_width(self, inner: int) -> Scheme | None:
        """The scheme for rows of ``inner`` numbers; None if the matrix stays float. Raises ValueError for a stored
        scheme that does not fit.
        """
        if self.layout != Format.MADE:
            if inner % (self.group or inner) or (self.group or inner) % _STEP:
                raise ValueError(f"rows of {inner} in groups of {self.group or inner} (whole eights are supported)")
            return replace(self, span=inner) if self.layout in (Format.NVFP4_PACKED, Format.MODELOPT) else self
        group = next((each for each in _GROUPS if inner % each == 0), None)
        if self.bits == 4 and group is not None:
            return replace(self, group=group)
        return None if inner % 2 else replace(self, bits=8, group=None)

    def nbytes(self, outer: int, inner: int, packed: bool = False) -> int:
        """Bytes of a matrix: numbers, 16-bit scales (32-bit ones of blocks, which files may have), and zero points; or
        8-bit scales, minimums, steps. packed: for a CPU, where multiples that are all one are left out (and numbers
        of 8 bits that fit in 6 take these, which only the numbers show).
        """
        groups = inner // (self.group or inner)
        if self.e2m1 and not packed and self.group == 16:  # a GPU multiplies these as whole numbers of 8 bits
            return outer * (inner + 4 * groups)
        if self.span is not None and not self.e2m1:
            each, multiples = 2 if self.minimums else 1, 0 if packed and self.ones else groups
            return outer * (inner * self.bits // 8 + each * (multiples + 2 * (inner // self.span)))
        scale, step = 1 if self.e2m1 else 2 if self.rows == 1 else 4, 0 if self.span is None else 4
        return outer * (inner * self.bits // 8 + groups * (scale if self.symmetric else scale + 1) + step)

    def __str__(self) -> str:
        kind = f"{'fp' if self.floats else 'int'}{self.bits}"
        if self.rows is None:
            return f"{kind} by tensor"
        if self.rows > 1:
            return f"{kind} in blocks of {self.rows} x {self.group}"
        return f"{kind} in groups of {self.group}" if self.group else f"{kind} by output"


@dataclass(frozen=True, slots=True)
class Quantization:
    """method: the tool's name. rules: names of modules (``Linear`` means all, ``re:`` begins a pattern of names in
    files, ``in:`` a part of a name between dots), and how they are quantised; names take precedence over patterns, and
    these over ``Linear``. named: of further modules by their full names, which may be many. ignore: modules that are
    not quantised. activations: what these would be rounded to by the files' authors, and are not here; "" for nothing.
    kv: the dtype that the files request for the KV cache, ``int8`` or ``fp8``; "" for none.
    """

    method: str
    rules: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...] = ()
    activations: str = ""
    kv: str = ""
    named: Mapping[str, Scheme] = field(default_factory=dict, hash=False)

    @classmethod
    def from_name(cls, how: str) -> Quantization:
        """By ``--quantize``: ``int8``, ``int4`` or ``fp8``. With int4 the output head is int8."""
        int8, int4 = Scheme(8, None, True, Format.MADE), Scheme(4, _GROUPS[0], True, Format.MADE)
        if how == "int4":
            return cls(Format.MADE, ((HEAD, int8), ("Linear", int4)))
        return cls(Format.MADE, (("Linear", replace(int8, floats=how == "fp8")),))

    @property
    def is_on_the_fly(self) -> bool:
        """Whether the files hold floats."""
        return self.method == Format.MADE

    def scheme(self, module: str, inner: int) -> Scheme | None:
        """How the matrix of a module is quantised; None if it is not. inner: numbers of a row.

        Raises ConfigError for an unsupported one.
        """
        own = "" if self.with_head or _OF_A_HEAD.search(module) is None else module.rpartition(".")[2]
        try:
            if any(_matches(module, each) for each in self.ignore):
                return None
            if module in self.named:
                return self.named[module].for_width(inner)
            rules = sorted(self.rules, key=_rank)
            found = [scheme for target, scheme in rules if own in target and _matches(module, target)]
            return found[0].for_width(inner) if found else None
        except ValueError as error:
            raise ConfigError(f"{module}: quantised weights ({self.method}): {error}") from error

    @property
    def all_rules(self) -> tuple[tuple[str, Scheme], ...]:
        """Those of single modules too."""
        return *self.rules, *self.named.items()

    @property
    def with_head(self) -> bool:
        """Whether an output head that is tied to the embedding can still be quantised."""
        return self.method in (Format.MADE, Format.GGUF)

    def __str__(self) -> str:
        inside = dict.fromkeys(str(scheme) for target, scheme in self.all_rules if target != HEAD)
        heads = [str(scheme) for target, scheme in self.all_rules if target == HEAD]
        return ", ".join((*inside, *(f"the output head {each}" for each in heads)))


#: A checkpoint's patterns are untrusted, and with some patterns `re` never ends. The seconds that a pattern may take
#: for a name, and the largest repeat count, since that determines its compiled size.
_MATCHING_SECONDS, _MOST_REPEATS = 0.1, 1000


@lru_cache(maxsize=1024)
def pattern(text: str) -> regex.Pattern[str]:
    """The compiled pattern. Raises ValueError, which says what is wrong with it."""
    if prod(max(1, int(count)) for count in regex.findall(r"(\d+)\}", text)) > _MOST_REPEATS:
        raise ValueError(f"repeats more than {_MOST_REPEATS:,} times")
    try:
        return regex.compile(text)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"is not a valid pattern ({error})") from None


def _rank(rule: tuple[str, Scheme]) -> int:
    """Names first, classes last."""
    target = rule[0]
    return 1 if target.startswith("re:") else 2 if target == "Linear" else 0


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        try:
            compiled = pattern(target.removeprefix("re:"))
            return any(compiled.match(name, timeout=_MATCHING_SECONDS) for name in stored_names(module, target))
        except TimeoutError:
            raise ValueError(f"matching {target!r} takes too long") from None
    if target.startswith("in:"):
        return target.removeprefix("in:") in f".{module}."
    return target in ("Linear", module)
