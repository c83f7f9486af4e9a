"""What others make of the same weights: one graph of torch's own ops, and transformers' ``generate``.

The graph is what an engine of library kernels replays for each token at batch 1: a product for each matrix, norms,
rotation and attention over one piece of memory for the keys and values. transformers runs views of the same tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.engines import Bench, answers, request, texts
from bench.gpu.steps import bench_of, over, steps_of
from bench.gpu.worker import Task
from foresay.spec.names import DRAFT_MODEL, NGRAM, NONE
from foresay.verifier.model.decoder import Decoder
from foresay.verifier.model.weights import LayerWeights, ModelWeights, places

#: Tokens looked up by transformers' prompt lookup, as in its documentation.
LOOKUP = 10


def weights_of(decoder: Decoder) -> ModelWeights:
    """Of a decoder without biases; on a GPU the very tensors that are served."""
    layers = []
    for one in decoder.layers:
        qkv, o, gate_up, down = (each._packed.plain() for each in (one.qkv, one.output, one.gate_up, one.down))
        layers.append(
            LayerWeights(qkv, None, o, None, gate_up, None, down, None, one.input_norm, one.post_norm, None, None)
        )
    return ModelWeights(decoder.embedding, layers, decoder.final_norm, decoder.head._packed.plain())


class Library:
    """A decoder's step of one token by torch's own ops, after ``context`` tokens whose keys and values are random."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        c, device = decoder.config, decoder.device
        self.config, self.weights, self.at = c, weights_of(decoder), context
        self.kept = torch.randn(c.num_layers, 2, 1, c.num_kv_heads, context + 1, c.head_dim, device=device).to(
            decoder.dtype
        )
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.rotation = decoder.rope.rows(torch.full((1,), context, device=device))  # looked up once for all layers

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """The step; the next token replaces this one."""
        x = functional.embedding(self.token, self.weights.embed)
        for layer, (keys, values) in zip(self.weights.layers, self.kept, strict=True):
            mixed = self._attended(functional.linear(self._normed(x, layer.input_norm), layer.qkv), keys, values)
            x = x + functional.linear(mixed, layer.o)
            gate, up = functional.linear(self._normed(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        logits = functional.linear(self._normed(x, self.weights.final_norm), self.weights.lm_head)
        self.token.copy_(logits.argmax(-1))
        return logits

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (len(weight),), weight, self.config.rms_norm_eps)

    def _attended(self, qkv: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (cos, sin), groups, at = self.rotation, self.config.num_kv_heads, slice(self.at, self.at + 1)
        turned, value = qkv.view(1, -1, 1, self.config.head_dim).split_with_sizes(
            (self.config.num_heads + groups, groups), 1
        )
        first, second = turned.chunk(2, dim=-1)
        turned = torch.addcmul(turned * cos, torch.cat((second, first), -1), sin)
        query, key = turned.split_with_sizes((self.config.num_heads, groups), 1)
        keys[:, :, at].copy_(key)
        values[:, :, at].copy_(value)
        return functional.scaled_dot_product_attention(
            query, keys[:, :, : self.at + 1], values[:, :, : self.at + 1], enable_gqa=groups < self.config.num_heads
        ).reshape(1, -1)

    @torch.inference_mode()
    def products(self) -> None:
        """Its products alone, each weight once."""
        layers = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in self.weights.layers]
        for weight in (*(each for layer in layers for each in layer), self.weights.lm_head):
            functional.linear(weight[:1], weight)


def library(task: Task) -> None:
    """A token by the library's kernels beside ours, after the same context, in turns."""
    bench, context, patience = bench_of(task, "8B"), task.settings.contexts[0], task.settings.patience
    theirs, ours = Library(bench.target.decoder, context), steps_of(task, bench, 1, context)

    def timed(call: Callable[[], object]) -> dict[str, Any]:
        captured = task.device.captured(call)
        before, mine, after = (
            task.device.median(captured, patience),
            ours.timed(patience),
            task.device.median(captured, patience),
        )
        found = {
            "value": min(before, after),
            "ours": mine["value"],
            "ours_over_theirs": mine["value"] / min(before, after),
        }
        return over(task, bench, found, NONE, 0, context)

    for what, call in (("a step", theirs), ("its products alone", theirs.products)):
        task.take(what, "s", timed, call, of="torch's ops in one graph", context=context)


def of_transformers(decoder: Decoder) -> Any:
    """A model of transformers whose weights are views of the decoder's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = decoder.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tie_word_embeddings, rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype=decoder.dtype,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model.load_state_dict(dict(places(c, weights_of(decoder))), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(decoder.device)  # of no checkpoint
    return model.eval()


def generates(task: Task) -> None:
    """Tokens a second of an answer: ours, and transformers plain, with our draft model, with prompt lookup."""
    bench, tokens, prompt, wanted = bench_of(task, "8B"), task.settings.tokens, texts(1)[0], list[int]()
    for name, tree in ((NONE, ""), (DRAFT_MODEL, "1,1,1,1"), (NGRAM, "1,1,1,1")):
        task.take("answer", "tokens/s", ours, bench, name, tree, prompt, tokens, wanted, by="foresay", drafter=name)
    model, draft = (of_transformers(one.decoder) for one in (bench.target, bench.drafter(DRAFT_MODEL).model))
    ways = {NONE: {}, DRAFT_MODEL: {"assistant_model": draft}, NGRAM: {"prompt_lookup_num_tokens": LOOKUP}}
    for name, how in ways.items():
        task.take(
            "answer", "tokens/s", theirs, task, model, prompt, tokens, wanted, how, by="transformers", drafter=name
        )


def ours(bench: Bench, name: str, tree: str, prompt: list[int], tokens: int, wanted: list[int]) -> dict[str, Any]:
    """By our engine; its tokens are left in ``wanted``."""
    engine = bench.engine(name, tree, True, min(1024, bench.positions // 2))
    answers(engine, [request(prompt, 4)])
    wanted[:], statistics = answers(engine, [request(prompt, tokens)])
    return {"value": statistics.decode_tokens_per_second, "steps": statistics.steps, "tokens": len(wanted)}


@torch.inference_mode()
def theirs(
    task: Task, model: Any, prompt: list[int], tokens: int, wanted: list[int], how: dict[str, Any]
) -> dict[str, Any]:
    """By transformers: all tokens but the first, over the time since then."""
    ids = torch.tensor([prompt], device=task.device.torch)

    def written(count: int) -> tuple[float, list[int]]:
        begun = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **how)
        return time.perf_counter() - begun, out[0, len(prompt) :].tolist()

    written(4)
    (first, _), (whole, found) = written(1), written(tokens)
    alike = sum(mine == other for mine, other in zip(found, wanted, strict=False)) / max(1, len(found))
    return {"value": (len(found) - 1) / max(whole - first, 1e-9), "tokens": len(found), "same_tokens": alike}
