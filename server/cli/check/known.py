"""What the catalog knows of a target: who drafts well for it."""

from __future__ import annotations

from collections.abc import Sequence

from server.cli.catalog.catalog import KnownDraft, find_target, of_shape
from server.engine.checks.origin import names_of
from server.engine.checks.report import Target
from server.settings.amounts import count_in_words


def recommended(name: str, target: Target | None = None) -> str:
    """Drafts for the target in a sentence; empty where none is known. target: None if it could not be read."""
    if name == "bundled":
        return "The bundled target's own draft model comes with it: --draft draft_model, or leave --draft out."
    names = [name] if target is None else [name, *sorted(names_of(target))]
    known = find_target(*names)
    if known is not None:
        return f"Known to draft for {known.id}: {_listed(known.drafts)}; foresay pull fetches them."
    alike = [] if target is None else of_shape(target.model)
    if not alike:
        return ""
    models = [draft for draft in alike[0].drafts if draft.kind == "draft_model"]
    if not models:
        return ""
    return f"It has the shape of {alike[0].id}; if it comes from that, these may draft for it: {_listed(models)}."


def _listed(drafts: Sequence[KnownDraft]) -> str:
    return ", ".join(f"--draft {draft.setting} ({count_in_words(draft.parameters)} weights)" for draft in drafts)
