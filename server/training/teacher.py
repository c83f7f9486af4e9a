"""The target as a teacher: it writes texts at temperature 1, and shows what it thought at every token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.heads.lesson import Lesson
from server.training.prompts import read_prompts
from spec.errors import ConfigurationError

#: Prompts are cut to so many of their last tokens, and to half of the text.
_PROMPT_TOKENS = 64


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
        """The prompts as token ids, for texts of ``length`` tokens; chats go through the model's own template."""
        found = [self._encoded(prompt) for prompt in read_prompts(path)]
        kept = [tokens[-min(_PROMPT_TOKENS, length // 2) :] for tokens in found if tokens]
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
    def write(self, prompts: Sequence[list[int]], length: int, generator: torch.Generator) -> Tensor:
        """int64[B, length]: each prompt and what the target goes on with; -1 behind the token that ends a text.

        Prompts are cut to the shortest one: give those of like length together.
        """
        shortest = min(len(tokens) for tokens in prompts)
        text = torch.tensor([tokens[-shortest:] for tokens in prompts], device=self.device)
        ends = torch.tensor(self._end_tokens, device=self.device, dtype=torch.int64)
        out = self.model(text, use_cache=True)
        while text.shape[1] < length:
            chances = out.logits[:, -1].float().softmax(dim=-1).cpu()
            drawn = torch.multinomial(chances, 1, generator=generator).to(self.device)
            over = (text[:, -1:] < 0) | (torch.isin(text[:, -1:], ends) & (text.shape[1] > shortest))
            text = torch.cat((text, drawn.masked_fill(over, -1)), dim=1)
            out = self.model(drawn, past_key_values=out.past_key_values, use_cache=True)
        return text[:, :length].cpu()

    @torch.no_grad()
    def lesson(self, tokens: Tensor, needs: Sequence[str]) -> Lesson:
        """What the target thinks of texts, int64[B, T], -1 behind their ends. needs: features by name."""
        counts = (tokens >= 0).float().to(self.device)
        tokens = tokens.clamp(min=0).to(self.device)
        out = self.model(tokens, output_hidden_states=True, use_cache=False)
        states = out.hidden_states
        features = {name: states[-1 if name == "final" else int(name.removeprefix("layer."))] for name in needs}
        return Lesson(tokens, features, out.logits, counts)
