"""The ``prediction`` of a request (OpenAI's predicted outputs): what its answer will probably be, as tokens.

OpenAI refuses it beside ``n``, log-probabilities, penalties and tools. Here all of these hold at every drafted token;
only what contradicts it is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.schemas.shared import GenerationRequest, Prediction
from server.text.options import scores_only
from server.text.room import Room
from spec.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from server.host.service import Service


from typing import Any

from server.schemas.shared import Speculation
from spec.names import NONE, canonical
from spec.request import EngineInfo
from spec.shape import MAX_NODES

#: The only types that there are.
CONTENT, TEXT = "content", "text"


async def prediction_of(service: Service, body: GenerationRequest, prompts: int = 1) -> list[int] | None:
    """The tokens of the predicted text; None if nothing is predicted. prompts: that shall be answered.

    Raises :class:`InvalidRequest` naming the field that is wrong, or that it cannot be together with.
    """
    if body.prediction is None:
        return None
    text = predicted_text(body.prediction)
    _check_company(body, prompts)
    most = service.opened()[1].max_model_len
    try:
        return await service.encode(text, False, room=Room("prediction.content", most + 1))
    except ContextLengthExceeded:
        message = f"prediction.content has more tokens than the model writes, {most} at most"
        raise InvalidRequest("prediction.content", message) from None


def predicted_text(prediction: Prediction) -> str:
    """The text, its parts joined."""
    if prediction.type != CONTENT:
        raise InvalidRequest("prediction.type", f"prediction.type must be {CONTENT}, got {prediction.type!r}")
    if isinstance(prediction.content, str):
        return prediction.content
    for index, part in enumerate(prediction.content):
        if part.type != TEXT:
            field = f"prediction.content[{index}].type"
            raise InvalidRequest(field, f"{field} must be {TEXT}, got {part.type!r}")
    return "".join(part.text for part in prediction.content)


def _check_company(body: GenerationRequest, prompts: int) -> None:
    """Raise for what contradicts a prediction."""
    if body.speculation is not None and body.speculation.off:
        raise InvalidRequest(
            "prediction", "prediction and speculation.off exclude each other: one drafts, one does not"
        )
    if prompts > 1:
        raise InvalidRequest("prediction", f"prediction is of one answer, but prompt holds {prompts} prompts")
    if scores_only(body):
        raise InvalidRequest("prediction", "prediction and max_tokens 0 exclude each other: nothing is written")


# -- the field speculation, checked ------------------------------------------------------------------------------------


#: Methods that name no drafter: whatever the server would do, and decoding plainly.
ANYBODY, NOBODY = "auto", NONE


def wishes(asked: Speculation | None, info: EngineInfo) -> dict[str, Any]:
    """The fields of a :class:`~spec.request.Request` that say it. Raises InvalidRequest naming the field."""
    if asked is None:
        return {}
    method, most = canonical(asked.method or ANYBODY), asked.max_tokens
    known = (ANYBODY, NOBODY, *info.drafters)
    if method not in known:
        raise InvalidRequest(
            "speculation.method",
            f'speculation.method must be one of {", ".join(known)} on this server, got "{asked.method}"',
        )
    if most is not None and not 0 <= most < MAX_NODES:
        raise InvalidRequest(
            "speculation.max_tokens", f"speculation.max_tokens must be from 0 to {MAX_NODES - 1}, got {most}"
        )
    if asked.off and (method not in (ANYBODY, NOBODY) or most):
        other = "max_tokens" if most else "method"
        raise InvalidRequest("speculation.off", f"speculation.off leaves nothing to draft: leave {other} out, or off")
    named = method if method in info.drafters and len(info.drafters) > 1 else ""
    return {
        "speculate": not asked.off and method != NOBODY and most != 0,
        "draft_method": named,
        "most_drafted": most,
    }
