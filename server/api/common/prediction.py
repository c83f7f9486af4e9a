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
