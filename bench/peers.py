"""Foresay beside transformers and llama.cpp: ``python -m bench.peers --target DIR --draft DIR``.

Same checkpoint, prompts, precision and thread count, in turns and in random order. Figures are of decoding alone:
tokens behind the first ones that came, over the time since then. transformers runs ``generate`` plain, with
``assistant_model`` and with ``prompt_lookup_num_tokens``, at its defaults unless a flag says otherwise; llama.cpp,
where ``--llama-server`` names it, plain, with a draft model and with its n-grams, from the same checkpoint in GGUF.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from bench import llama, prompts, record
from bench.decode import progress
from bench.drive import Options, add_arguments, build_all, mode_of, request, run, torchs_threads, warm_up
from bench.llama import Decoded
from bench.stats import paired_ratio, spread
from foresay.spec.engine import Engine
from foresay.spec.sampling import SamplingParams
from foresay.verifier.model.hub import resolve
from foresay.verifier.ops.kernels.cpu import threads

#: (prompt, temperature, seed) -> what was written, and how fast
Decode = Callable[[list[int], float, int], Decoded]
LOOKUP_TOKENS = 10  # as in transformers' own documentation of prompt lookup


def ours(engine: Engine, max_tokens: int) -> Decode:
    """One of our engines. Who looks things up in earlier answers sees those of the same round and temperature alone: in
    the others the same prompts were asked before, and what is compared with was told nothing."""

    def decode(prompt: list[int], temperature: float, seed: int) -> Decoded:
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        done = run(engine, request(prompt, params, salt=f"temperature {temperature:g}, seed {seed}"))
        return Decoded(done.tokens, done.tokens_per_second)

    return decode


class Arrivals(BaseStreamer):
    """When tokens came out of ``generate``, which hands on the prompt first. came: how many, and when."""

    def __init__(self) -> None:
        self.came: list[tuple[int, float]] = []

    def put(self, value: torch.Tensor) -> None:
        """These came."""
        self.came.append((value.numel(), time.perf_counter()))

    def end(self) -> None:
        """Nothing more."""

    @property
    def speed(self) -> float:
        """Tokens behind the first ones, over the time since then."""
        _, (_, first), *rest = self.came
        return sum(count for count, _ in rest) / (rest[-1][1] - first)


def theirs(model: Any, max_tokens: int, **kwargs: Any) -> Decode:
    """The ``generate`` of transformers, with ``kwargs`` on top."""

    def decode(prompt: list[int], temperature: float, seed: int) -> Decoded:
        torch.manual_seed(seed)
        arrivals = Arrivals()
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        how = sampling if temperature else {"do_sample": False}
        ids = torch.tensor([prompt])
        with torchs_threads(threads.wanted()):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                pad_token_id=0,
                streamer=arrivals,
                **how,
                **kwargs,
            )
        return Decoded([int(token) for token in out[0, len(prompt) :]], arrivals.speed)

    return decode


def llamas(servers: dict[str, llama.LlamaServer], max_tokens: int) -> dict[str, Decode]:
    """The ways llama.cpp decodes."""

    def of(server: llama.LlamaServer) -> Decode:
        return lambda prompt, temperature, seed: server.decode(prompt, temperature, seed, max_tokens)

    return {way: of(server) for way, server in servers.items()}


def load_peer(name: str, dtype: str) -> Any:
    """A model of transformers that never stops at an end token."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        resolve(name), dtype=getattr(torch, dtype), trust_remote_code=False
    ).eval()
    model.generation_config.eos_token_id = None
    return model


def peers(args: argparse.Namespace, dtype: str) -> dict[str, Decode]:
    """The ways transformers decodes."""
    model = load_peer(args.target, dtype)
    ways = {
        "transformers": theirs(model, args.max_tokens),
        "transformers prompt lookup": theirs(model, args.max_tokens, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }
    if args.draft:
        assistant = load_peer(args.draft, dtype)
        if args.assistant_tokens:
            assistant.generation_config.num_assistant_tokens = args.assistant_tokens
        ways["transformers assisted"] = theirs(model, args.max_tokens, assistant_model=assistant)
    return ways


class Bout:
    """Everybody decodes the same prompts in turns; keeps what came by way, temperature, prompt and round."""

    def __init__(self, ways: dict[str, Decode], args: argparse.Namespace) -> None:
        self.ways, self.args = ways, args
        self.taken: dict[tuple[str, float], dict[str, list[Decoded]]] = {
            (way, temperature): defaultdict(list) for way in ways for temperature in args.temperatures
        }

    def run(self, asked: dict[str, list[int]]) -> None:
        """All rounds."""
        order, begun = random.Random(self.args.seed), time.perf_counter()
        for turn in range(self.args.rounds):
            for number, (name, prompt) in enumerate(asked.items(), 1):
                for temperature in self.args.temperatures:
                    for way in order.sample(sorted(self.ways), len(self.ways)):
                        decoded = self.ways[way](prompt, temperature, self.args.seed + turn)
                        self.taken[way, temperature][name].append(decoded)
                progress(f"round {turn + 1}/{self.args.rounds}, prompt {number}/{len(asked)}", begun)

    def speeds(self, way: str, temperature: float) -> dict[str, list[float]]:
        """Tokens per second, by prompt."""
        return {prompt: [one.speed for one in done] for prompt, done in self.taken[way, temperature].items()}

    def summary(self, way: str, temperature: float, ours: Sequence[str]) -> dict[str, Any]:
        """Speed, and how many times as fast each of ``ours`` is."""
        own = self.speeds(way, temperature)
        result: dict[str, Any] = {"tokens_per_second": spread([x for speeds in own.values() for x in speeds])}
        for other in ours:
            speeds = self.speeds(other, temperature)
            pairs = {prompt: list(zip(speeds[prompt], own[prompt], strict=True)) for prompt in own}
            result[f"{other} is faster by"] = paired_ratio(pairs)
        return result

    def agreement(self, way: str, base: str) -> float:
        """Share of the prompts that ``way`` and ``base`` continued with the same tokens at temperature 0."""
        mine, other = self.taken[way, 0.0], self.taken[base, 0.0]
        same = [a.tokens == b.tokens for prompt in mine for a, b in zip(mine[prompt], other[prompt], strict=True)]
        return sum(same) / len(same)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Foresay beside others.")
    add_arguments(parser)
    parser.add_argument("--modes", nargs="+", type=mode_of, default=("none", "ngram", "draft_model:4"))
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 1.0))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--assistant-tokens", type=int, help="tokens transformers' assistant drafts (its default)")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server; needs --gguf")
    parser.add_argument("--gguf", type=Path, help="the target in GGUF, in the same precision")
    parser.add_argument("--quantize", choices=("int8", "int4", "fp8"), help="our weights; transformers is left out")
    parser.add_argument("--draft-gguf", type=Path, help="the draft model in GGUF")
    args = parser.parse_args()
    if (args.llama_server is None) != (args.gguf is None):
        parser.error("--llama-server and --gguf go together")
    return args


def main() -> None:
    args = arguments()
    logging.set_verbosity_error()  # it has advice on every call
    if args.llama_server is None:
        measure(args, {})
        return
    with llama.servers(args.llama_server, args.gguf, args.draft_gguf, args.threads or threads.wanted()) as found:
        measure(args, found)


def measure(args: argparse.Namespace, servers: dict[str, llama.LlamaServer]) -> None:
    """Build everything, let all decode in turns, and keep the record."""
    options = replace(Options.of(args), quantize=args.quantize)
    engines = build_all(args.modes, options)
    first = next(iter(engines.values()))
    encode = prompts.Encoder(options.tokenizer)
    asked = {prompt.name: encode(prompt) for prompt in prompts.load(args.prompts, args.limit)}
    own = {f"foresay {mode}": ours(engine, args.max_tokens) for mode, engine in engines.items()}
    beside = {} if args.quantize else peers(args, first.info.dtype)
    ways = own | beside | llamas(servers, args.max_tokens)
    warm_up(engines.values(), next(iter(asked.values())))
    for decode in ways.values():
        decode(next(iter(asked.values())), 1.0, args.seed + args.rounds)  # no round has this seed
    bout, kept = Bout(ways, args), args.quantize or first.info.dtype
    bout.run(asked)
    result: dict[str, Any] = {}
    for temperature in args.temperatures:
        rows = {way: bout.summary(way, temperature, list(own)) for way in ways}
        record.table(
            f"temperature {temperature:g}, {kept}, {threads.wanted()} threads, decoding alone",
            ["decoding", "tok/s", *(f"{other} is faster by" for other in own)],
            [[way, *row.values()] for way, row in rows.items()],
        )
        result[f"{temperature:g}"] = rows
    agreement = {}
    if 0.0 in args.temperatures:
        agreement = {way: bout.agreement(way, next(iter(own))) for way in ways}
        print("same tokens as ours at temperature 0:", ", ".join(f"{way} {x:.0%}" for way, x in agreement.items()))
    shape = {"prompts": len(asked), "rounds": args.rounds, "max_tokens": args.max_tokens, "quantize": args.quantize}
    extra = {"assistant_tokens": args.assistant_tokens, "lookup_tokens": LOOKUP_TOKENS, "agreement": agreement}
    if servers:
        extra |= {"llama.cpp": llama.version(args.llama_server), "llama.cpp draft tokens": llama.DRAFTED}
    model = record.models(first, args.target, args.draft)
    record.finish("peers", {**model, **shape, **extra, "temperature": result}, not args.no_save)


if __name__ == "__main__":
    main()
