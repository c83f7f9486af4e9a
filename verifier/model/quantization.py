"""Which matrices of a model are of few bits with scales, and how: by config.json, or as ``--quantize`` makes them.

::

    made                as it is loaded, of floats
    pack-quantized      compressed-tensors: ``weight_packed``, ``weight_scale``, perhaps ``weight_zero_point``
    int-quantized       compressed-tensors: ``weight`` of int8, ``weight_scale``, perhaps ``weight_zero_point``
    float-quantized     compressed-tensors: ``weight`` of e4m3, ``weight_scale``
    fp8                 ``weight`` of e4m3, ``weight_scale_inv`` of blocks
    gptq, gptq_v2       ``qweight``, ``qzeros``, ``scales``, ``g_idx``; the first stores zeros less one
    awq                 ``qweight``, ``qzeros``, ``scales``, outputs of a word in an order of their own
    gguf                blocks of llama.cpp's file (:mod:`verifier.model.gguf.blocks`)

What the numbers mean: :mod:`verifier.ops.quantized`. Where they stand in the files: :mod:`verifier.model.stored`.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from verifier.model.errors import ConfigError
from verifier.model.fields import Fields

MADE, PACKED, INTEGERS, AWQ, GGUF = "made", "pack-quantized", "int-quantized", "awq", "gguf"
FLOATS8, BLOCKS = "float-quantized", "fp8"
GPTQ = ("gptq", "gptq_v2")
HEAD = "lm_head"
#: Groups that ``--quantize int4`` tries; what none of them divides becomes int8.
_GROUPS = (128, 64, 32)
#: All modules of the layers.
_LAYERS = r"re:model\.layers\."
#: A step of the kernels' takes so many numbers of a row.
_STEP = 8
_KEYS = ("quantization_config", "compression_config")
SUPPORTED = "compressed-tensors (int8, int4 in groups, fp8), fp8 in blocks, gptq and awq (4 bits)"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a matrix is quantised. group: numbers of a row that have a scale together; None: all of them. symmetric:
    whether 0 means zero. layout: see above. span: numbers that have a step together, of which scales are multiples;
    None: scales are what they are. minimums: whether groups have such too. floats: whether numbers are e4m3. rows: that
    have a scale together in the files.
    """

    bits: int
    group: int | None
    symmetric: bool
    layout: str
    span: int | None = None
    minimums: bool = False
    floats: bool = False
    rows: int = 1

    def fitting(self, inner: int) -> Scheme | None:
        """The same for rows of so many numbers; None for one that stays what it is. Raises ValueError for a stored one
        that cannot be.
        """
        if self.layout != MADE:
            if inner % (self.group or inner) or (self.group or inner) % _STEP:
                raise ValueError(f"rows of {inner} in groups of {self.group or inner} (whole eights are supported)")
            return self
        group = next((each for each in _GROUPS if inner % each == 0), None)
        if self.bits == 4 and group is not None:
            return replace(self, group=group)
        return None if inner % 2 else replace(self, bits=8, group=None)

    def nbytes(self, outer: int, inner: int) -> int:
        """What so many numbers take: themselves, scales of 16 bits (32 of blocks, which files may have), and zeros; or
        scales of 8 bits, minimums, steps.
        """
        groups = inner // (self.group or inner)
        if self.span is not None:
            each = 2 if self.minimums else 1
            return outer * (inner * self.bits // 8 + each * (groups + 2 * (inner // self.span)))
        scale = 4 if self.rows > 1 else 2
        return outer * (inner * self.bits // 8 + groups * (scale if self.symmetric else scale + 1))

    def __str__(self) -> str:
        kind = f"{'fp' if self.floats else 'int'}{self.bits}"
        if self.rows > 1:
            return f"{kind} in blocks of {self.rows} x {self.group}"
        return f"{kind} in groups of {self.group}" if self.group else f"{kind} by output"


@dataclass(frozen=True, slots=True)
class Quantization:
    """method: who made it. rules: what modules are called (``Linear`` stands for all, ``re:`` begins a pattern), and
    how they are quantised; names come before patterns, and these before ``Linear``. ignore: what is not quantised.
    """

    method: str
    rules: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...] = ()

    @classmethod
    def made(cls, how: str) -> Quantization:
        """As ``--quantize`` makes it: ``int8``, ``int4`` or ``fp8``. Of int4 the output head stays int8."""
        int8, int4 = Scheme(8, None, True, MADE), Scheme(4, _GROUPS[0], True, MADE)
        if how == "int4":
            return cls(MADE, ((HEAD, int8), ("Linear", int4)))
        return cls(MADE, (("Linear", replace(int8, floats=how == "fp8")),))

    @property
    def is_made(self) -> bool:
        """Whether the files hold floats."""
        return self.method == MADE

    def scheme(self, module: str, inner: int) -> Scheme | None:
        """How the matrix of a module is quantised, None if it is not. inner: numbers of a row.

        Raises ConfigError for one that is not supported.
        """
        if any(_matches(module, each) for each in self.ignore):
            return None
        found = [scheme for target, scheme in sorted(self.rules, key=_rank) if _matches(module, target)]
        try:
            return found[0].fitting(inner) if found else None
        except ValueError as error:
            raise ConfigError(f"{module}: quantised weights ({self.method}): {error}") from error

    @property
    def with_head(self) -> bool:
        """Whether an output head that is tied to the embedding can be quantised all the same."""
        return self.method in (MADE, GGUF)

    def __str__(self) -> str:
        inside = dict.fromkeys(str(scheme) for target, scheme in self.rules if target != HEAD)
        heads = [str(scheme) for target, scheme in self.rules if target == HEAD]
        return ", ".join((*inside, *(f"the output head {each}" for each in heads)))


def _rank(rule: tuple[str, Scheme]) -> int:
    """Names first, classes last."""
    target = rule[0]
    return 1 if target.startswith("re:") else 2 if target == "Linear" else 0


def _matches(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in ("Linear", module)


def read_quantization(fields: Fields) -> Quantization | None:
    """What config.json says; None for a model of floats. Raises ConfigError for what is not supported."""
    for key in _KEYS:
        section = fields.section(key)
        if section is not None:
            method = str(section.get("quant_method") or "unnamed")
            readers = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, BLOCKS: _blocks, GGUF: _gguf}
            if method not in readers:
                raise fields.error(f"{key}: quantised weights ({method}) are not supported; supported are {SUPPORTED}")
            return readers[method](_Section(section, method))
    return None


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of config.json, and whose it is."""

    fields: Fields
    method: str

    def refuse(self, what: str) -> ConfigError:
        """What is not supported."""
        return self.fields.error(f"quantised weights ({self.method}): {what}; supported are {SUPPORTED}")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, empty where absent."""
        found = self.fields.get(key) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.fields.error(f"{key} must be a list of names")
        for each in found:
            try:
                re.compile(each.removeprefix("re:") if each.startswith("re:") else "")
            except re.error as error:
                raise self.fields.error(f"{key}: {each!r} is no pattern ({error})") from error
        return tuple(found)


def _compressed(section: _Section) -> Quantization:
    if section.fields.get("kv_cache_scheme"):
        raise section.refuse("a quantised KV cache (kv_cache_scheme) is not supported")
    sparsity = section.fields.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise section.refuse(f"sparse weights ({sparsity.get('format')}) are not supported")
    groups = section.fields.section("config_groups")
    if groups is None:
        raise section.fields.error("config_groups is missing")
    rules = [rule for name in groups.values for rule in _rules(section, groups, name)]
    return Quantization(section.method, tuple(rules), section.names("ignore"))


def _rules(section: _Section, groups: Fields, name: str) -> Iterator[tuple[str, Scheme]]:
    group = groups.section(name)
    if group is None:
        raise groups.error(f"{name} is empty")
    own = _Section(group, section.method)
    layout = group.get("format") or section.fields.get("format")
    if layout not in (PACKED, INTEGERS, FLOATS8, "naive-quantized"):
        raise own.refuse(f"format {layout!r} is not supported")
    if group.get("output_activations") or not _unrounded(group.section("input_activations"), layout):
        raise own.refuse(f"{name}: activations that are rounded too (W8A8 and the like) are not supported")
    weights = group.section("weights")
    if weights is None:
        raise own.refuse(f"{name} has no weights")
    scheme = _scheme(_Section(weights, section.method), str(layout))
    for target in own.names("targets"):
        yield target, scheme


def _unrounded(activations: Fields | None, layout: object) -> bool:
    """Whether weights mean the same if activations stay as they are: to fp8 they are rounded by what is there."""
    return activations is None or (layout == FLOATS8 and activations.flag("dynamic", False))


def _scheme(weights: _Section, layout: str) -> Scheme:
    fields = weights.fields
    kind, strategy, bits = fields.get("type") or "int", fields.get("strategy"), fields.integer("num_bits")
    floats = layout == FLOATS8
    if kind != ("float" if floats else "int") or bits not in ((4, 8) if layout == PACKED else (8,)):
        raise weights.refuse(f"{bits} bits of type {kind} are not supported")
    if strategy not in ("channel", "group", *(("block",) if floats else ())):
        raise weights.refuse(f"strategy {strategy!r} is not supported")
    if fields.get("actorder") in (True, "group", "dynamic"):
        raise weights.refuse("groups in another order than the numbers (actorder) are not supported")
    if strategy == "block":
        return _in_blocks(weights, "block_structure", layout)
    group = fields.integer("group_size") if strategy == "group" else None
    kept = layout if layout in (PACKED, FLOATS8) else INTEGERS
    return Scheme(bits, group, fields.flag("symmetric", True), kept, floats=floats)


def _in_blocks(section: _Section, key: str, layout: str) -> Scheme:
    """e4m3, scales of blocks of so many rows and columns."""
    found = section.fields.get(key)
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(one, int) and one > 1 for one in found):
        raise section.refuse(f"{key} {found!r} is not supported, it must be two sizes such as [128, 128]")
    return Scheme(8, found[1], True, layout, floats=True, rows=found[0])


def _blocks(section: _Section) -> Quantization:
    """As DeepSeek and Qwen write it."""
    if (kind := section.fields.get("fmt") or "e4m3") != "e4m3":
        raise section.refuse(f"fmt {kind!r} is not supported")
    if (how := section.fields.get("activation_scheme") or "dynamic") != "dynamic":
        raise section.refuse(f"activation_scheme {how!r} is not supported")
    kept = tuple(rf"re:(.*\.)?{re.escape(one)}(\.|$)" for one in section.names("modules_to_not_convert"))
    scheme = _in_blocks(section, "weight_block_size", BLOCKS)
    return Quantization(section.method, ((_LAYERS, scheme),), kept)


def _gptq(section: _Section) -> Quantization:
    layout = section.fields.get("checkpoint_format") or GPTQ[0]
    if layout not in GPTQ:
        raise section.refuse(f"checkpoint_format {layout!r} is not supported")
    if section.fields.get("lm_head"):
        raise section.refuse("a quantised output head (lm_head) is not supported")
    return _of_layers(section, str(layout), section.fields.flag("sym", True), ())


def _awq(section: _Section) -> Quantization:
    if str(section.fields.get("version") or "gemm").lower() != "gemm":
        raise section.refuse(f"version {section.fields.get('version')!r} is not supported")
    ignore = tuple(f"re:.*{re.escape(each)}" for each in section.names("modules_to_not_convert"))
    return _of_layers(section, AWQ, not section.fields.flag("zero_point", True), ignore)


def _of_layers(section: _Section, layout: str, symmetric: bool, ignore: tuple[str, ...]) -> Quantization:
    """4 bits in all matrices of the layers."""
    bits, group = section.fields.integer("bits"), section.fields.get("group_size")
    if bits != 4:
        raise section.refuse(f"{bits} bits are not supported")
    size = None if group == -1 else section.fields.integer("group_size", 128)
    return Quantization(section.method, ((_LAYERS, Scheme(4, size, symmetric, layout)),), ignore)


#: What the types of GGUF's blocks are as whole numbers.
_OF_GGUF = {
    "Q8_0": Scheme(8, 32, True, GGUF),
    "Q4_0": Scheme(4, 32, True, GGUF),
    "Q4_1": Scheme(4, 32, True, GGUF, 32, True),
    "Q5_0": Scheme(8, 32, True, GGUF),
    "Q5_1": Scheme(8, 32, True, GGUF, 32, True),
    "Q4_K": Scheme(4, 32, True, GGUF, 256, True),
    "Q5_K": Scheme(8, 32, True, GGUF, 256, True),
    "Q6_K": Scheme(8, 16, True, GGUF, 256),
}


def _gguf(section: _Section) -> Quantization:
    """What is made of a file's metadata: modules, and the types of those that are multiplied as one."""
    modules = section.fields.get("modules")
    return Quantization(GGUF, tuple((str(target), _holding(kinds)) for target, kinds in modules))


def _holding(kinds: list[str]) -> Scheme:
    """One that holds numbers of all of these types as they are."""
    found = [_OF_GGUF[kind] for kind in kinds]
    if len(set(found)) == 1:
        return found[0]
    groups = [one.group or 0 for one in found]
    spans = [one.span or group for one, group in zip(found, groups, strict=True)]
    return Scheme(8, min(groups), True, GGUF, min(spans), any(one.minimums for one in found))
