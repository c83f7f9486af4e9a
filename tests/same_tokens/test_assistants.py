"""An assistant that knows what its target knows is always right: in every step, at every depth, at any temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.drafters.assistant import AssistantDrafter
from foresay.spec.tree import TreeShape
from foresay.verifier.heads.assistant import AssistantHead
from foresay.verifier.model.decoder import Decoder
from tests.heads.assistants import make_assistant
from tests.same_tokens.heads import store_of
from tests.same_tokens.models import engine_of
from tests.same_tokens.runs import assert_same, jobs_of, plain
from tests.same_tokens.witness import run
from tests.verifier.families import make
from tests.verifier.reading import load_decoder

LENGTHS = (9, 40, 17, 3)


@torch.no_grad()
def silent(model: Any) -> None:
    """Of a token alone everything follows: attention and MLPs add nothing."""
    for layer in model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, AssistantHead]:
    """A target whose next token depends on the last one alone, and an assistant with its embedding and norm."""
    directory: Path = tmp_path_factory.mktemp("knowing")
    made = make("gemma4", directory / "target", final_logit_softcapping=None)
    silent(made.model)
    with torch.no_grad():
        made.model.norm.weight.mul_(0.25)  # so that a token is not always followed by itself
    made.save_pretrained(directory / "target")
    target = load_decoder(directory / "target")
    width = target.config.hidden_size
    assistant = make_assistant(directory / "assistant", target.config, text={"hidden_size": width})
    silent(assistant.model)
    with torch.no_grad():
        assistant.pre_projection.weight.copy_(torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1))
        assistant.model.embed_tokens.weight.copy_(made.model.embed_tokens.weight)
        assistant.model.norm.weight.copy_(made.model.norm.weight)
    assistant.save_pretrained(directory / "assistant")
    return target, AssistantHead.load(directory / "assistant", target)


@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape((2, 2, 1, 1))])
def test_what_it_drafts_is_accepted(knowing, shape) -> None:
    target, assistant = knowing
    jobs = jobs_of(target.config.vocab_size, LENGTHS, 41, ["greedy", "warm", "cool", "warm"])
    wanted = plain(target, jobs)
    texts = run(engine_of(target, lambda pool: AssistantDrafter(assistant, store_of(pool)), shape), jobs)
    assert_same(wanted, texts)
    for text in texts.values():
        assert text.statistics is not None
        # Of 41 tokens one comes with the prompt; each step writes its four levels, and one more. A tree that grows by
        # chances may leave out a level for a second child.
        if len(text.tokens) == 41:
            assert text.statistics.accepted == 32 if shape.is_chain else text.statistics.accepted >= 26
    assert len({token for text in texts.values() for token in text.tokens}) > 20, "not one token over and over"
