"""The target as a teacher: it writes texts, and shows what it thought at every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from foresay.drafters.heads.lesson import Lesson
from foresay.drafters.training.prompts import Messages, Prompt, read_prompts
from foresay.spec.errors import ConfigurationError
from foresay.verifier.model.errors import ModelError, code_refused
from foresay.verifier.model.hub import BESIDE


class Teacher:
    """A transformers model, frozen. device: where it runs; dtype: of weights and activations.

    stored_dtype: that of the checkpoint, in which its heads are stored too.
    """

    def __init__(self, directory: Path, device: str, dtype: torch.dtype) -> None:
        self.directory, self.device = directory, device
        self.stored_dtype, self.tokenizer, model = _loaded(directory, dtype)
        self.model = model.to(device).eval()
        self.model.requires_grad_(False)
        self.config = self.model.config

    @property
    def beside(self) -> list[Path]:
        """The files that a model of the same vocabulary shares with the target."""
        return sorted({file for pattern in BESIDE for file in self.directory.glob(pattern) if file.is_file()})

    @property
    def special_tokens(self) -> dict[str, object]:
        """The ids that config.json names."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: getattr(self.config, name, None) for name in names}

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
        """The prompts as token ids, at most half of a text of ``length``; chats go through the model's own template.

        Raises ConfigurationError naming file and line for a chat that the template refuses.
        """
        found = [self._encoded(prompt) for prompt in read_prompts(path)]
        kept = [tokens[-(length // 2) :] for tokens in found if tokens]
        if not kept:
            raise ConfigurationError(f"--prompts {path}: every prompt is empty")
        if max(map(max, kept)) >= self.config.vocab_size:
            raise ConfigurationError(
                f"--target {self.directory}: its tokenizer has tokens beyond the {self.config.vocab_size} of the model"
            )
        return kept

    def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt.content, str):
            return list(self.tokenizer(prompt.content, verbose=False)["input_ids"])
        text = self._rendered(prompt.content, prompt.where)
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _rendered(self, messages: Messages, where: str) -> str:
        if self.tokenizer.chat_template is None:
            raise ConfigurationError(f"--prompts {where}: is a chat, but the target has no chat template")
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigurationError(
                f"--prompts {where}: the target's chat template refuses these messages ({reason})"
            ) from error

    @property
    def _end_tokens(self) -> list[int]:
        """The tokens that end a text, by the model's generation_config.json."""
        ends = self.model.generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @torch.inference_mode()
    def write(
        self,
        prompts: Sequence[list[int]],
        length: int,
        temperature: float,
        generator: torch.Generator,
        told: Callable[[float], None] = lambda share: None,
    ) -> list[Tensor]:
        """Each prompt and what the target goes on with: int64[T], at most ``length``, with the token that ends a text.

        Prompts are cut to the shortest one: give those of like length together. generator: on the teacher's device.
        told: how much of the texts is written, from 0 to 1.
        """
        from transformers import StaticCache

        shortest = min(len(tokens) for tokens in prompts)
        text = torch.tensor([tokens[-shortest:] for tokens in prompts], device=self.device)
        ends = torch.tensor(self._end_tokens, device=self.device, dtype=torch.int64)
        going = torch.ones_like(text[:, :1], dtype=torch.bool)
        # Appending to a growing cache would copy all of it at every token.
        out = self.model(text, past_key_values=StaticCache(config=self.config, max_cache_len=length), use_cache=True)
        if out.logits[:, -1].isnan().any():
            raise ConfigurationError(
                f"--target {self.directory}: computes no numbers (NaN); its weights may be damaged"
            )
        while text.shape[1] < length and going.any():
            sampled = _sampled(out.logits[:, -1], temperature, generator)
            text = torch.cat((text, sampled.masked_fill(~going, -1)), dim=1)
            going &= ~torch.isin(sampled, ends)
            out = self.model(sampled, past_key_values=out.past_key_values, use_cache=True)
            told((text.shape[1] - shortest) / (length - shortest))
        return [row[row >= 0].clone() for row in text.cpu()]

    @torch.no_grad()
    def lesson(self, tokens: Tensor, needs: Sequence[str]) -> Lesson:
        """What the target thinks of texts, int64[B, T]. needs: features by name."""
        tokens = tokens.to(self.device)
        out = self.model(tokens, output_hidden_states=bool(needs), use_cache=False)
        states = out.hidden_states
        places = {name: -1 if name == "final" else int(name.removeprefix("layer.")) for name in needs}
        return Lesson(tokens, {name: states[place].float() for name, place in places.items()}, out.logits.float())


def _sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """int64[B, 1]: a token for each row of logits [B, V]; the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    chances = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(chances, 1, generator=generator)


def _loaded(directory: Path, dtype: torch.dtype) -> tuple[torch.dtype, Any, Any]:
    """The checkpoint's dtype, the tokenizer and the model. Raises ModelError for what cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    part, file = "the configuration", "config.json"
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(directory, **own)
        stored: torch.dtype = config.dtype or torch.float32
        config._attn_implementation = "sdpa"  # config.json may name a hub repository, whose code would be run
        part, file = "the tokenizer (tokenizer.json, tokenizer_config.json)", "tokenizer_config.json"
        tokenizer = AutoTokenizer.from_pretrained(directory, **own)
        part, file = "the model", "config.json"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, **own
        )
    except Exception as error:  # broken files make transformers, tokenizers and safetensors raise errors of any kind
        reason = code_refused(file, error) or (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"--target {directory}: {part} cannot be loaded ({reason})") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"--target {directory}: {missing[0]} is missing from its weights ({len(missing)} are)")
    return stored, tokenizer, model
