"""The target as a teacher: it writes texts, and shows what it thought at every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.lesson import Lesson
from server.training.prompts import read_prompts
from spec.errors import ConfigurationError


class Teacher:
    """A transformers model, frozen. device: where it runs; dtype: of weights and activations.

    stored_dtype: that of the checkpoint, in which its heads are stored too.
    """

    def __init__(self, directory: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.device = device
        try:
            self.stored_dtype: torch.dtype = AutoConfig.from_pretrained(directory).dtype or torch.float32
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--target {directory}: cannot be loaded ({str(error).splitlines()[0]})"
            ) from error
        self.model = model.to(device).eval()
        self.model.requires_grad_(False)
        self.config = self.model.config

    @property
    def embedding(self) -> Tensor:
        """fp32[V, H]: the input embedding."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.float()

    @property
    def lm_head(self) -> Tensor:
        """fp32[V, H]: the output matrix."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.float()

    def prompts(self, path: Path, length: int) -> list[list[int]]:
        """The prompts as token ids, at most half of a text of ``length``; chats go through the model's own template."""
        found = [self._encoded(prompt) for prompt in read_prompts(path)]
        kept = [tokens[-(length // 2) :] for tokens in found if tokens]
        if not kept:
            raise ConfigurationError(f"--prompts {path}: every prompt is empty")
        return kept

    def _encoded(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if self.tokenizer.chat_template is None:
            raise ConfigurationError("--prompts: holds chats, but the target has no chat template")
        text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def _end_tokens(self) -> list[int]:
        """The tokens that end a text, by the model's generation_config.json."""
        ends = self.model.generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[list[int]], length: int, temperature: float, generator: torch.Generator
    ) -> list[Tensor]:
        """Each prompt and what the target goes on with: int64[T], at most ``length``, with the token that ends a text.

        Prompts are cut to the shortest one: give those of like length together.
        """
        from transformers import StaticCache

        shortest = min(len(tokens) for tokens in prompts)
        text = torch.tensor([tokens[-shortest:] for tokens in prompts], device=self.device)
        ends = torch.tensor(self._end_tokens, device=self.device, dtype=torch.int64)
        going = torch.ones_like(text[:, :1], dtype=torch.bool)
        # Appending to a growing cache would copy all of it at every token.
        out = self.model(text, past_key_values=StaticCache(config=self.config, max_cache_len=length), use_cache=True)
        while text.shape[1] < length and going.any():
            drawn = _drawn(out.logits[:, -1], temperature, generator)
            text = torch.cat((text, drawn.masked_fill(~going, -1)), dim=1)
            going &= ~torch.isin(drawn, ends)
            out = self.model(drawn, past_key_values=out.past_key_values, use_cache=True)
        return [row[row >= 0].clone() for row in text.cpu()]

    @torch.no_grad()
    def lesson(self, tokens: Tensor, needs: Sequence[str]) -> Lesson:
        """What the target thinks of texts, int64[B, T]. needs: features by name."""
        tokens = tokens.to(self.device)
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        states = out.hidden_states
        features = {name: states[-1 if name == "final" else int(name.removeprefix("layer."))] for name in needs}
        return Lesson(tokens, features, out.logits)


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """int64[B, 1]: a token for each row of logits [B, V]; the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    chances = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(chances.cpu(), 1, generator=generator).to(logits.device)
