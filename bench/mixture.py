"""The cost of a mixture's pass besides what it must read: ``python -m bench mixture [--rows 1 2 4]``.

A mixture of OLMoE's layers, fewer of them, with random weights is made in memory: its routing is random too, and
activates more experts than texts do. The experts that a pass activates are counted as the kernels count them;
``reading`` is the time to read these, attention and the head, at the bandwidth that is probed in turns with the passes.
For comparison there is a pass of a dense model whose MLP is as wide as a row's experts together.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from bench import record
from bench.experiment import Case, Experiment, Sample, Variant
from bench.floor import CONTEXT, Reads, timed
from foresay.kvpaging import KVStore, PagePool, PageTable
from foresay.server.engine.parameters import quantized
from foresay.spec.protocols import Rows
from foresay.verifier.model.config import ModelConfig, kv_shapes
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.nodes import MLP, Attention, Experts, Layer, Stack
from foresay.verifier.model.products import NormKind
from foresay.verifier.model.rope_config import RopeConfig
from foresay.verifier.model.weights import allocate, destinations
from foresay.verifier.model_runner import ModelRunner
from foresay.verifier.ops.quantized import QuantizedMatrix

READING, MIXTURE, DENSE = "reading", "mixture", "dense"


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4, help="of 2048, each expert 1024 wide (4)")
    parser.add_argument("--quantize", default="int4", help="int4, int8 or none")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4, 8, 16, 256))
    parser.add_argument("--repeats", type=int, default=15)


def main(args: Namespace) -> None:
    inner = Experts(args.experts, args.chosen, 1024)
    passes = {MIXTURE: Passes(inner, args), DENSE: Passes(MLP(inner.width), args)}
    reads, mixture = Reads(), passes[MIXTURE]

    def read(case: Case, turn: int) -> Sample:
        return Sample({"ms": 1e3 * mixture.must_read / reads()})

    def of(name: str) -> Variant:
        def measure(case: Case, turn: int) -> Sample:
            milliseconds = 1e3 * timed(lambda: passes[name].run(case.input))
            woken = {"woken": mixture.woken} if name == MIXTURE else {}
            return Sample({"ms": milliseconds, **woken})

        return Variant(name, measure)

    experiment = Experiment(
        variants=[of(MIXTURE), Variant(READING, read), of(DENSE)],
        cases=[Case(f"{n} rows", "", n) for n in args.rows],
        figure="ms",
        bases=(READING, DENSE),
        rounds=args.repeats,
        warm=2,
    )
    _, found = experiment.run()
    record.finish("mixture", {"groups": found.groups}, not args.no_save)


class Passes:
    """Passes of a model with this in each of its layers; each begins a new text of random tokens."""

    def __init__(self, inner: MLP | Experts, args: Namespace) -> None:
        how = None if args.quantize == "none" else args.quantize
        self.config = quantized(_config(inner, args.layers), how, "--quantize")
        self.woken = 0.0
        decoder = Decoder(self.config, _random(self.config), 1024, rounds=how == "int4")
        pool = PagePool(64, 16)
        self.runner = ModelRunner(decoder, KVStore(pool, kv_shapes(self.config), decoder.dtype), 1024)
        self.table = PageTable(pool)
        self.table.reserve(CONTEXT)
        self.table.commit(CONTEXT)

    def run(self, rows: int) -> None:
        """One pass of so many rows. woken: how many of a layer's experts had rows in it."""
        self.table.reserve(rows)
        tokens = torch.randint(self.config.vocab_size, (rows,))
        self.woken = self.runner.run([Rows(self.table, tokens, CONTEXT)]).woken

    @property
    def must_read(self) -> float:
        """Bytes that a pass with so many active experts reads."""
        layer, head = self.runner.decoder.layers[0], self.runner.decoder.head.nbytes
        mixture = self.config.first.mlp
        assert isinstance(mixture, Experts), "it has some"
        share = self.woken / mixture.count
        own = layer.qkv.nbytes + layer.output.nbytes + share * sum(one.nbytes for one in layer.inner)
        return self.config.num_layers * own + head


def _config(inner: MLP | Experts, layers: int) -> ModelConfig:
    norm, attention = NormKind(1e-5), Attention(16, 16, 128, 128**-0.5, RopeConfig(10_000.0))
    stack = Stack((Layer(attention, inner, norm),) * layers, norm)
    return ModelConfig("OlmoeForCausalLM", 32_000, 2048, stack, False, 4096, "bfloat16", ())


def _random(config: ModelConfig) -> Any:
    """Weights of the size at which activations keep theirs."""
    weights, generator = allocate(config, torch.bfloat16), torch.Generator().manual_seed(0)
    for name, into in destinations(config, weights):
        if isinstance(into, QuantizedMatrix):
            into.put(torch.randint(-7, 8, into.shape, dtype=torch.int8, generator=generator))
            into.scales.fill_(0.25 / into.inner**0.5)
        elif name.endswith("norm.weight"):
            into.fill_(1.0)
        else:
            into.normal_(0.0, into.shape[-1] ** -0.5, generator=generator)
    return weights
