"""How a checkpoint's matrices are quantised, from its config.json. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foresay.verifier.model.errors import ConfigError
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.file import SCHEMES
from foresay.verifier.model.names import module_name
from foresay.verifier.model.quantization import Format, Quantization, Scheme, pattern

#: All modules of the layers.
_LAYERS = r"re:model\.layers\."
_KEYS = ("quantization_config", "compression_config")
#: What ModelOpt's older checkpoints have instead.
MODELOPT_FILE = "hf_quant_config.json"
SUPPORTED = (
    "compressed-tensors (int8, int4 in groups, fp8, mxfp4, nvfp4), fp8, mxfp4, modelopt (nvfp4, fp8, or both), "
    "gptq and awq (4 bits)"
)
#: Numbers that share a scale, by layouts of 4-bit floats.
_FLOATS4 = {Format.MXFP4_PACKED: 32, Format.NVFP4_PACKED: 16}
#: The layouts of compressed-tensors, by their names there.
_COMPRESSED = {
    **{each.value: each for each in (Format.PACKED, Format.INTEGERS, Format.FLOATS8, *_FLOATS4)},
    "naive-quantized": Format.INTEGERS,
}


def read_quantization(fields: Fields, directory: Path | None = None) -> Quantization | None:
    """The quantisation in config.json; None for a float model. directory: where ModelOpt's own file may lie instead.
    Raises ConfigError if it is not supported."""
    for key in _KEYS:
        section = fields.section(key)
        if section is not None:
            method = str(section.get("quant_method") or "unnamed")
            readers = {
                "compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _blocks, "mxfp4": _mxfp4,
                "gguf": _gguf, "modelopt": _modelopt, "modelopt_fp4": _modelopt,
            }  # fmt: skip
            if method not in readers:
                raise fields.error(f"{key}: quantised weights ({method}) are not supported; supported: {SUPPORTED}")
            return readers[method](_Section(section, method))
    if directory is None or not (own := directory / MODELOPT_FILE).exists():
        return None
    section = Fields.read(own).section("quantization")
    return (
        None if section is None or section.get("quant_algo") is None else _modelopt(_Section(section, Format.MODELOPT))
    )


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of config.json, with the method's name."""

    fields: Fields
    method: str

    def refuse(self, what: str) -> ConfigError:
        """The error for unsupported values."""
        return self.fields.error(f"quantised weights ({self.method}): {what}; supported: {SUPPORTED}")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, empty if absent."""
        found = self.fields.get(key) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.fields.error(f"{key} must be a list of names")
        self.check(key, found)
        return tuple(one if one.startswith("re:") else module_name(one) for one in found)

    def check(self, key: str, names: Sequence[str]) -> None:
        """Raise ConfigError for invalid patterns."""
        for each in names:
            if not each.startswith("re:"):
                continue
            try:
                pattern(each.removeprefix("re:"))
            except ValueError as error:
                raise self.fields.error(f"{key}: {each[:200]!r} {error}") from error


def _compressed(section: _Section) -> Quantization:
    sparsity = section.fields.section("sparsity_config")
    if sparsity is not None and sparsity.get("format") not in (None, "dense"):
        raise section.refuse(f"sparse weights ({sparsity.get('format')}) are not supported")
    groups = section.fields.section("config_groups")
    if groups is None:
        raise section.fields.error("config_groups is missing")
    rules = [rule for name in groups.values for rule in _rules(section, groups, name)]
    rounded = dict.fromkeys(kind for name in groups.values if (kind := _activations(section, groups, name)))
    return Quantization(section.method, tuple(rules), section.names("ignore"), ", ".join(rounded), _kv(section))


def _rules(section: _Section, groups: Fields, name: str) -> Iterator[tuple[str, Scheme]]:
    group = groups.section(name)
    if group is None:
        raise groups.error(f"{name} is empty")
    own = _Section(group, section.method)
    name_of = group.get("format") or section.fields.get("format")
    if (layout := _COMPRESSED.get(str(name_of))) is None:
        raise own.refuse(f"format {name_of!r} is not supported")
    if group.get("output_activations"):
        raise own.refuse(f"{name}: outputs that are rounded (output_activations) are not supported")
    weights = group.section("weights")
    if weights is None:
        raise own.refuse(f"{name} has no weights")
    scheme = _scheme(_Section(weights, section.method), layout)
    for target in own.names("targets"):
        yield target, scheme


def _activations(section: _Section, groups: Fields, name: str) -> str:
    """What the inputs of a group of modules would be rounded to; weights mean the same if they are not."""
    group = groups.section(name)
    found = None if group is None else group.section("input_activations")
    return "" if found is None else _kind(found)


def _kind(of: Fields) -> str:
    return f"{'fp' if of.get('type') == 'float' else 'int'}{of.integer('num_bits')}"


def _kv(section: _Section) -> str:
    """The requested KV cache dtype. Scales that files have for it are not used: each head of a token gets its own."""
    if not section.fields.get("kv_cache_scheme"):
        return ""
    if section.method == Format.BLOCKS:  # where it is a string, or such a section
        return "fp8"
    scheme = section.fields.section("kv_cache_scheme")
    kind = "" if scheme is None else _kind(scheme)
    if kind not in ("int8", "fp8"):
        raise section.refuse(f"kv_cache_scheme: a KV cache of {kind} is not supported")
    return kind


def _scheme(weights: _Section, layout: Format) -> Scheme:
    fields = weights.fields
    kind, strategy, bits = fields.get("type") or "int", fields.get("strategy"), fields.integer("num_bits")
    floats = layout == Format.FLOATS8
    if layout in _FLOATS4:
        return _floats4(weights, layout, kind)
    if kind != ("float" if floats else "int") or bits not in ((4, 8) if layout == Format.PACKED else (8,)):
        raise weights.refuse(f"{bits} bits of type {kind} are not supported")
    symmetric, whole = fields.flag("symmetric", True), strategy == "tensor"
    known = "channel", "group", *(("block",) if floats else ()), *(("tensor",) if symmetric else ())
    if strategy not in known:
        raise weights.refuse(f"strategy {strategy!r} is not supported")
    if strategy == "block":
        return _in_blocks(weights, "block_structure", layout)
    group = fields.integer("group_size") if strategy == "group" else None
    ordered = fields.get("actorder") in (True, "group", "dynamic")
    return Scheme(bits, group, symmetric, layout, floats=floats, rows=None if whole else 1, ordered=ordered)


def _floats4(weights: _Section, layout: Format, kind: object) -> Scheme:
    """e2m1 with scales of 8 bits, in groups of the size that the format has."""
    bits, group = weights.fields.integer("num_bits"), weights.fields.integer("group_size")
    if (kind, bits, group) != ("float", 4, _FLOATS4[layout]) or not weights.fields.flag("symmetric", True):
        raise weights.refuse(f"{layout} with {bits} bits of type {kind} in groups of {group} is not supported")
    return Scheme(4, group, True, layout, floats=True)


def _in_blocks(section: _Section, key: str, layout: Format) -> Scheme:
    """e4m3, with a scale for each block of rows and columns."""
    found = section.fields.get(key)
    if not isinstance(found, list) or len(found) != 2 or not all(isinstance(one, int) and one > 1 for one in found):
        raise section.refuse(f"{key} {found!r} is not supported, it must be two sizes such as [128, 128]")
    return Scheme(8, found[1], True, layout, floats=True, rows=found[0])


def _blocks(section: _Section) -> Quantization:
    """The format of DeepSeek and Qwen; without blocks there is one scale for each tensor."""
    if (kind := section.fields.get("fmt") or "e4m3") != "e4m3":
        raise section.refuse(f"fmt {kind!r} is not supported")
    if (how := section.fields.get("activation_scheme") or "dynamic") not in ("dynamic", "static"):
        raise section.refuse(f"activation_scheme {how!r} is not supported")
    names = (*section.names("modules_to_not_convert"), *section.names("ignored_layers"))
    kept = tuple(one if one.startswith("re:") else f"in:.{one}." for one in names)
    scheme = Scheme(8, None, True, Format.BLOCKS, floats=True, rows=None)
    if section.fields.get("weight_block_size") is not None:
        scheme = _in_blocks(section, "weight_block_size", Format.BLOCKS)
    return Quantization(section.method, ((_LAYERS, scheme),), kept, "fp8", _kv(section))


def _mxfp4(section: _Section) -> Quantization:
    """The format of gpt-oss: only experts."""
    return Quantization(section.method, (("in:.experts.", Scheme(4, 32, True, Format.MXFP4, floats=True)),))


def _modelopt(section: _Section) -> Quantization:
    """NVIDIA's NVFP4, or e4m3 with a scale for each tensor, or one of these for each module, from config.json or from
    hf_quant_config.json, which names some keys differently."""
    if (kv := section.fields.get("kv_cache_quant_algo")) not in (None, "FP8"):
        raise section.refuse(f"kv_cache_quant_algo {kv!r} is not supported")
    globs = (*section.names("ignore"), *section.names("exclude_modules"))
    kept = tuple("re:" + re.escape(glob).replace(r"\*", ".*") + r"(\.|$)" for glob in globs)
    layers = section.fields.section("quantized_layers")
    if section.fields.get("quant_algo") != "MIXED_PRECISION":
        scheme, rounded = _of_modelopt(section.fields)
        return Quantization(Format.MODELOPT, (("Linear", scheme),), kept, rounded, "fp8" if kv else _kv(section))
    if layers is None:
        raise section.fields.error("quantized_layers is missing")
    own = {module_name(name): _of_modelopt(layers.section(name) or Fields({}, name)) for name in layers.values}
    rounded = ", ".join(dict.fromkeys(each for _, each in own.values() if each))
    named = {name: scheme for name, (scheme, _) in own.items()}
    return Quantization(Format.MODELOPT, (), kept, rounded, "fp8" if kv else _kv(section), named)


def _of_modelopt(fields: Fields) -> tuple[Scheme, str]:
    """How some modules are quantised, and what their inputs would be rounded to."""
    algorithm, group = fields.get("quant_algo"), fields.integer("group_size", 16)
    if algorithm == "FP8":
        return Scheme(8, None, True, Format.FLOATS8, floats=True, rows=None), "fp8"
    if algorithm not in ("NVFP4", "W4A16_NVFP4") or group != 16:
        fault = f"quant_algo {algorithm!r} in groups of {group} is not supported"
        raise _Section(fields, Format.MODELOPT).refuse(fault)
    return Scheme(4, 16, True, Format.MODELOPT, floats=True), "fp4" if algorithm == "NVFP4" else ""


def _gptq(section: _Section) -> Quantization:
    layout = section.fields.get("checkpoint_format") or Format.GPTQ
    if layout not in (Format.GPTQ, Format.GPTQ_V2):
        raise section.refuse(f"checkpoint_format {layout!r} is not supported")
    if section.fields.get("lm_head"):
        raise section.refuse("a quantised output head (lm_head) is not supported")
    made = _of_layers(section, Format(layout), section.fields.flag("sym", True), ())
    ordered = section.fields.flag("desc_act", False)
    return replace(made, rules=tuple((target, replace(scheme, ordered=ordered)) for target, scheme in made.rules))


def _awq(section: _Section) -> Quantization:
    if str(section.fields.get("version") or "gemm").lower() != "gemm":
        raise section.refuse(f"version {section.fields.get('version')!r} is not supported")
    ignore = tuple(f"in:{each}" for each in section.names("modules_to_not_convert"))
    return _of_layers(section, Format.AWQ, not section.fields.flag("zero_point", True), ignore)


def _of_layers(section: _Section, layout: Format, symmetric: bool, ignore: tuple[str, ...]) -> Quantization:
    """4 bits in all matrices of the layers."""
    bits, group = section.fields.integer("bits"), section.fields.get("group_size")
    if bits != 4:
        raise section.refuse(f"{bits} bits are not supported")
    size = None if group == -1 else section.fields.integer("group_size", 128)
    return Quantization(section.method, ((_LAYERS, Scheme(4, size, symmetric, layout)),), ignore)


def _gguf(section: _Section) -> Quantization:
    """The section made from a GGUF file's metadata: modules, and the types of those that are fused."""
    modules = section.fields.get("modules")
    section.check("modules", [str(target) for target, _ in modules])
    return Quantization(Format.GGUF, tuple((str(target), _holding(section, kinds)) for target, kinds in modules))


def _holding(section: _Section, kinds: list[str]) -> Scheme:
    """A scheme that can hold numbers of all of these types exactly."""
    found = [SCHEMES[kind] for kind in kinds]
    if len(set(found)) == 1:
        return found[0]
    if any(one.e2m1 for one in found):
        raise section.refuse(f"matrices that are multiplied as one of types {', '.join(kinds)} are not supported")
    groups = [one.group or 0 for one in found]
    spans = [one.span or group for one, group in zip(found, groups, strict=True)]
    ones = all(one.span is None or one.ones for one in found)
    return Scheme(8, min(groups), True, Format.GGUF, min(spans), any(one.minimums for one in found), ones=ones)
