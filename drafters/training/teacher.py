"""The target as a teacher: it generates texts, and its hidden states at every token; and these texts as training
batches, step by step: each comes once per epoch, together with others of similar length.

A target's pass over a text costs as much as training a head on it, so its states are kept in bf16 if they are not too
large: on a CPU in the run's folder, on a GPU, which computes them all in seconds, in its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from foresay.drafters.heads.training_batch import TrainingBatch
from foresay.drafters.training import files
from foresay.drafters.training.prompts import Messages, Prompt, read_prompts
from foresay.spec.errors import ConfigurationError
from foresay.verifier.model.checkpoint import Checkpoint
from foresay.verifier.model.config import ModelConfig
from foresay.verifier.model.errors import ModelError, code_refused
from foresay.verifier.model.families import WRAPPED
from foresay.verifier.model.fields import Fields
from foresay.verifier.model.gguf.file import LINK
from foresay.verifier.model.layers import Stack
from foresay.verifier.model.names import SHARED_FILES

#: The state after the last norm, the input of the output matrix.
FINAL = "final"


def with_final(needs: Sequence[str]) -> list[str]:
    """Features by name, and after them the state that logits are computed from."""
    return [*(name for name in needs if name != FINAL), FINAL]


class Example(NamedTuple):
    """tokens: int64[T], a prompt and the target's continuation. start: where the continuation begins."""

    tokens: Tensor
    start: int


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
    def tokenizer_files(self) -> list[Path]:
        """The files, such as the tokenizer's, that a model with the same vocabulary shares with the target."""
        return sorted({file for pattern in SHARED_FILES for file in self.directory.glob(pattern) if file.is_file()})

    @property
    def special_tokens(self) -> dict[str, object]:
        """The special token ids in config.json."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: getattr(self.config, name, None) for name in names}

    @property
    def embedding(self) -> Tensor:
        """fp32[V, H]: the input embedding, scaled if the model does that."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.float() * self._stack.embedding_scale

    @property
    def lm_head(self) -> Tensor:
        """fp32[V, H]: the output matrix, times the logit scale."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.float() * self._stack.logit_scale

    @cached_property
    def _stack(self) -> Stack:
        return ModelConfig.from_directory(self.directory).stack

    def prompts(self, path: Path, length: int) -> list[list[int]]:
        """The prompts as token ids, at most half of a text of ``length``; chats are rendered with the model's template.

        Raises ConfigurationError, which names file and line, for a chat that the template refuses.
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
        """The end tokens in the model's generation_config.json."""
        ends = self.model.generation_config.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @torch.inference_mode()
    def write(
        self,
        prompts: Sequence[list[int]],
        length: int,
        temperature: float,
        generator: torch.Generator,
        progress: Callable[[float], None] = lambda share: None,
    ) -> list[Example]:
        """Each prompt and the target's continuation, at most ``length`` tokens in all, including the end token.

        Prompts are padded to the longest one: pass those of similar length together. generator: on the teacher's
        device.
        progress: called with the share of the texts that is generated, from 0 to 1.
        """
        from transformers import StaticCache

        longest = max(map(len, prompts))
        sizes = torch.tensor([len(tokens) for tokens in prompts], device=self.device)
        text = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in prompts], device=self.device)
        seen = torch.arange(length, device=self.device) >= longest - sizes[:, None]
        ends = torch.tensor(self._end_tokens, device=self.device, dtype=torch.int64)
        going = torch.ones_like(text[:, :1], dtype=torch.bool)
        # A growing cache would be copied at every token.
        cache = StaticCache(config=self.config, max_cache_len=length)
        given, written = text, text
        while True:
            size = written.shape[1]
            positions = torch.arange(size - given.shape[1], size, device=self.device) - (longest - sizes)[:, None]
            out = self.model(
                given, attention_mask=seen[:, :size].long(), position_ids=positions.clamp(0), past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
            if written is text and out.logits.isnan().any():
                raise ConfigurationError(f"--target {self.directory}: computes NaN; its weights may be damaged")
            given = _sampled(out.logits[:, -1], temperature, generator)
            written = torch.cat((written, given.masked_fill(~going, -1)), dim=1)
            going &= ~torch.isin(given, ends)
            progress((written.shape[1] - longest) / (length - longest))
            if written.shape[1] == length or not going.any():
                break
        whole = zip(written.cpu(), prompts, strict=True)
        return [
            Example(row[longest - len(tokens) :][row[longest - len(tokens) :] >= 0].clone(), len(tokens))
            for row, tokens in whole
        ]

    @torch.no_grad()
    def states(self, tokens: Tensor, needs: Sequence[str]) -> Tensor:
        """[B, T, F * H]: the features ``needs`` of texts, int64[B, T], concatenated; ``"final"`` is one of them."""
        out = self.model.model(tokens.to(self.device), output_hidden_states=True, use_cache=False)
        layers = [-1 if name == FINAL else int(name.removeprefix("layer.")) for name in needs]
        return torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)

    def make_batch(
        self, texts: Sequence[Example], needs: Sequence[str], room: int = 0, known: Sequence[Tensor] = ()
    ) -> TrainingBatch:
        """Texts with the target's features. needs: features by name. room: padding rows after the longest text. known:
        the states of each text, [T, F * H], if they are known.
        """
        names = with_final(needs)
        tokens = pad_sequence([text.tokens for text in texts], batch_first=True)
        tokens = functional.pad(tokens, (0, room))
        states = pad_sequence(list(known), batch_first=True) if known else self.states(tokens, names)
        states = functional.pad(states, (0, 0, 0, tokens.shape[1] - states.shape[1])).to(self.device).float()
        about = torch.arange(1, tokens.shape[1] + 1)
        starts, ends = (
            torch.tensor(each)[:, None] for each in ([t.start for t in texts], [len(t.tokens) for t in texts])
        )
        features = dict(zip(names, states.chunk(len(names), dim=-1), strict=True))
        counted = ((about >= starts) & (about < ends)).to(self.device)
        return TrainingBatch(tokens.to(self.device), features, self.lm_head, counted, logit_cap=self._stack.logit_cap)


def _of_gguf(directory: Path, dtype: torch.dtype) -> Any:
    """The model with the dequantised weights of a GGUF file."""
    import transformers

    values = Fields.read(directory / "config.json").values
    if values["architectures"][0] in WRAPPED:
        raise ModelError("heads cannot be trained for the texts' part of a model of texts and images yet")
    made = getattr(transformers, values["architectures"][0])
    own = ModelConfig.from_directory(directory)
    if own.stack.recurrence is not None:
        raise ModelError("heads cannot be trained for recurrent models in GGUF files yet")
    config = made.config_class(**{key: each for key, each in values.items() if key != "quantization_config"})
    model = made(config).to(dtype)
    with torch.no_grad():
        checkpoint = Checkpoint.open(directory)
        for file in checkpoint.files:
            opened = checkpoint.opened(file)
            for name in opened.offset_keys():
                tensor = opened.get_tensor(name)
                whole = tensor if isinstance(tensor, Tensor) else tensor.plain()
                model.get_parameter(name).copy_(whole - int(name in own.less_one))
    return model


def _sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """int64[B, 1]: a token for each row of logits [B, V]; the likeliest at temperature 0."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    chances = (logits.float() / temperature).softmax(dim=-1)
    return torch.multinomial(chances, 1, generator=generator)


def _loaded(directory: Path, dtype: torch.dtype) -> tuple[torch.dtype, Any, Any]:
    """The checkpoint's dtype, the tokenizer and the model. Raises ModelError if one cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    part, file = "the configuration", "config.json"
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if (directory / LINK).exists():
            return torch.bfloat16, AutoTokenizer.from_pretrained(directory, **own), _of_gguf(directory, dtype)
        config = AutoConfig.from_pretrained(directory, **own)
        stored: torch.dtype = config.dtype or torch.float32
        # config.json may name a hub repository, whose code would be run; torch's SDPA does not cap scores.
        config._attn_implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        part, file = "the tokenizer (tokenizer.json, tokenizer_config.json)", "tokenizer_config.json"
        tokenizer = AutoTokenizer.from_pretrained(directory, **own)
        part, file = "the model", "config.json"
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, **own
        )
    except Exception as error:  # with broken files transformers, tokenizers and safetensors raise errors of any kind
        reason = code_refused(file, error) or (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"--target {directory}: {part} cannot be loaded ({reason})") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"--target {directory}: {missing[0]} is missing from its weights ({len(missing)} are)")
    return stored, tokenizer, model


#: The most bytes of states that are kept on a CPU; the share of a GPU's free memory; texts per file of states.
_KEPT_AT_MOST, _SHARE = 12 << 30, 0.5
TEXTS_IN_FILE = 128


class TrainingBatches:
    """Lessons from texts. needs: features by name. batch: texts in a step. room: padding rows after the longest one."""

    def __init__(self, teacher: Teacher, texts: Sequence[Example], needs: Sequence[str], size: int, room: int) -> None:
        self._teacher, self._texts, self._needs, self._room = teacher, texts, needs, room
        order = sorted(range(len(texts)), key=lambda number: len(texts[number].tokens))
        self._groups = [order[start : start + size] for start in range(0, len(order), size)]
        self._known: list[Tensor] = []
        self._likeliest: dict[int, Tensor] = {}

    def batch_at(self, step: int, seed: int) -> TrainingBatch:
        """The batch of a step: each epoch has all groups, in its own order."""
        turn, index = divmod(step, len(self._groups))
        generator = torch.Generator().manual_seed(seed * 1_000_033 + turn)
        return self._of(int(torch.randperm(len(self._groups), generator=generator)[index]))

    def all(self) -> Iterator[TrainingBatch]:
        """The batches of all groups."""
        yield from map(self._of, range(len(self._groups)))

    def _of(self, number: int) -> TrainingBatch:
        group = self._groups[number]
        known = [self._known[text] for text in group] if self._known else ()
        batch = self._teacher.make_batch([self._texts[text] for text in group], self._needs, self._room, known)
        if not known:
            return batch
        if number not in self._likeliest:  # a product with the whole vocabulary, once and not in every epoch
            self._likeliest[number] = batch.compute_top_tokens()
        return replace(batch, top_tokens=self._likeliest[number])

    @property
    def keeps_states(self) -> bool:
        """Whether the target's states of all texts are kept."""
        names = with_final(self._needs)
        size: int = sum(len(text.tokens) for text in self._texts) * len(names) * self._teacher.config.hidden_size * 2
        if self._in_files:
            return size <= _KEPT_AT_MOST
        return size <= _SHARE * torch.cuda.mem_get_info(self._teacher.device)[0]

    @property
    def _in_files(self) -> bool:
        return self._teacher.device == "cpu"

    def read(self, file: Callable[[int], Path], shown: Callable[[int], None]) -> None:
        """Run the target over every text that it has not read yet. file: the file of states by number. shown: called
        with the number of texts read."""
        if self._in_files:
            self._read_to_files(file, shown)
        else:
            self._read_groups(shown)

    def _read_groups(self, shown: Callable[[int], None]) -> None:
        """One step's texts at a time; their states stay on the device."""
        known: dict[int, Tensor] = {}
        for group in self._groups:
            states = self._states(pad_sequence([self._texts[text].tokens for text in group], batch_first=True))
            known |= {
                text: rows[: len(self._texts[text].tokens)].clone() for text, rows in zip(group, states, strict=True)
            }
            shown(len(known))
        self._known = [known[text] for text in range(len(self._texts))]

    def _read_to_files(self, file: Callable[[int], Path], shown: Callable[[int], None]) -> None:
        for number, start in enumerate(range(0, len(self._texts), TEXTS_IN_FILE)):
            path, texts = file(number), self._texts[start : start + TEXTS_IN_FILE]
            if not path.exists():
                states: list[Tensor] = []
                for text in texts:
                    states.append(self._states(text.tokens[None])[0].clone())
                    shown(start + len(states))
                files.save(path, states)
            self._known += files.load(path)
            shown(start + len(texts))

    def _states(self, tokens: Tensor) -> Tensor:
        return self._teacher.states(tokens, with_final(self._needs)).bfloat16()
