"""The parts that need the whole of the model that the bars are about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.gpu import drafting, same, speed, split, verify
from bench.gpu.compiling import CHUNK
from bench.gpu.engines import Bench
from bench.gpu.models import BUNDLED, scribble
from bench.gpu.replay import highest_tau
from bench.gpu.session import Session
from bench.gpu.shapes import ModelShape, draft_model_bytes, eagle_bytes, step_bytes
from foresay.drafters.proposer import Drafts
from foresay.spec.names import DRAFT_MODEL
from foresay.spec.tree import TreeShape
from foresay.verifier.graphs.plain import RootOnly
from foresay.verifier.paged_model import PagedModel

#: Tokens beside those of the longest context: a block of whole steps, trees, and what several answers take.
SPARE_TOKENS = 1024
#: The chain of the bar about whole steps.
BAR_LEVELS = 5


def time_steps(session: Session, model: ModelShape, target: PagedModel) -> list[verify.Timed]:
    """Verifying steps of one model."""
    chosen = session.settings
    scribble(target.store)
    timed = verify.measure(
        session.device, target, chosen.rows, chosen.contexts, session.read, session.clock, chosen.patience
    )
    verify.show(model.name, timed)
    session.found.setdefault("steps", {})[model.name] = verify.as_json(timed)
    return timed


class BarModel:
    """The parts that need the whole of the model that the bars are about; it is made by the first of them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._bench: Bench | None = None

    @property
    def bench(self) -> Bench:
        """The model and its drafters."""
        if self._bench is None:
            chosen = self.session.settings
            tokens = max(chosen.contexts) + SPARE_TOKENS
            self._bench = Bench(self.session.device, chosen.bar, chosen.draft, chosen.eagle, chosen.positions, tokens)
        return self._bench

    @property
    def texts(self) -> list[list[int]]:
        """Token ids of three prompts."""
        return speed.prompts(BUNDLED / "target", 3)

    def steps(self) -> None:
        """Part c, and the bars about single steps."""
        session, target = self.session, self.bench.target
        chosen, shortest = session.settings, min(session.settings.contexts)
        timed = time_steps(session, chosen.bar, target)
        session.found["prefill"] = [
            verify.prefill(session.device, target, tokens, CHUNK, chosen.patience) for tokens in chosen.prompts_read
        ]
        steady = verify.steadiness(session.device, target, shortest, chosen.steps, session.clock)
        warm = verify.temperature(session.device, target, shortest, 4 * chosen.patience)
        session.found |= {"steadiness": steady, "temperature": warm}
        session.measured |= {
            "verify_64_over_1": verify.row_factor(timed, max(chosen.rows)),
            "ns_per_context_token": verify.nanoseconds_per_token(timed),
            "p99_over_p50": steady["p99_over_p50"],
            "temperature_1_over_0": warm["ratio"],
        }

    def drafting(self) -> None:
        """Part d, and whole steps with replayed acceptance."""
        session, chosen, looped, whole = self.session, self.session.settings, [], []
        context, item = min(chosen.contexts), session.device.dtype.itemsize
        head: Any = self.bench.drafter("random")
        model: Any = self.bench.drafter(DRAFT_MODEL)
        for store in (head.store, head.fed, model.model.store):
            scribble(store)
        reads: dict[str, Callable[[int, float], float]] = {
            "head": lambda levels, at: eagle_bytes(chosen.eagle, levels, at, item),
            "model": lambda levels, at: draft_model_bytes(model.model.decoder.config, levels, at, item),
        }
        target = self.bench.target

        def verified(at: float) -> float:
            return step_bytes(target.decoder.config, at, item) / session.read

        if session.clock.fits("whole plain step", 8 * chosen.patience):
            plain = RootOnly(1, session.device.torch)
            whole.append(
                drafting.whole_step(
                    session.device, target, plain, context, 1.0, verified, 4 * chosen.patience, chosen.block
                )
            )
            session.measured["plain_step_over_floor"] = whole[0].seconds / whole[0].floor
        for kind, read in reads.items():
            for levels in chosen.levels:
                shape = TreeShape.chain(levels)
                proposer = Drafts(head if kind == "head" else model, shape, 1, target.vocab_size)

                def alone(at: float, read: Callable[[int, float], float] = read, levels: int = levels) -> float:
                    return read(levels, at) / session.read

                def together(at: float, alone: drafting.Floor = alone) -> float:
                    return alone(at) + verified(at)

                if session.clock.fits(f"draft loop, {kind}, {levels}", 6 * chosen.patience):
                    looped.append(drafting.loop(session.device, target, proposer, context, alone, chosen.patience))
                if session.clock.fits(f"whole step, {kind}, {levels}", 8 * chosen.patience):
                    tau, patience = highest_tau(levels), 4 * chosen.patience
                    whole.append(
                        drafting.whole_step(
                            session.device, target, proposer, context, tau, together, patience, chosen.block
                        )
                    )
        tree = Drafts(model, TreeShape.parse(chosen.tree), 1, target.vocab_size)
        if session.clock.fits("whole step, a tree", 8 * chosen.patience):
            at = partial(self._tree_floor, model.model, tree.shape)
            whole.append(
                drafting.whole_step(session.device, target, tree, context, None, at, 4 * chosen.patience, chosen.block)
            )
        drafting.show(looped, whole)
        session.found |= drafting.as_json(looped, whole)
        barred = [w.seconds / w.floor for w in whole if w.drafter == head.name and w.levels == BAR_LEVELS]
        session.measured["eagle_chain_over_floor"] = barred[0] if barred else None

    def _tree_floor(self, model: PagedModel, shape: TreeShape, at: float) -> float:
        """Of a draft model's pass for each level, and of the target's."""
        item = self.session.device.dtype.itemsize
        drafted = draft_model_bytes(model.decoder.config, shape.levels, at, item)
        return (drafted + step_bytes(self.bench.target.decoder.config, at, item)) / self.session.read

    def same(self) -> None:
        """Part g."""
        session, chosen = self.session, self.session.settings
        needs = chosen.patience * 20
        found = list(same.compare(self.bench, self.texts, chosen.same_tokens, session.clock, needs))
        same.show(found)
        session.found["same_tokens"] = same.as_json(found)
        for compared in found:
            where = f"{compared.way}, T={compared.temperature}"
            session.expect(compared.parts_at is None, f"same tokens: {where} parts at {compared.parts_at}")

    def split(self) -> None:
        """Part f."""
        session, chosen, found = self.session, self.session.settings, {}
        texts, tokens = self.texts[:1], 2 * chosen.tokens
        pages = speed.pages_for(self.bench, texts, tokens)
        for name, tree in (("none", ""), ("eagle3", ",".join("1" * BAR_LEVELS)), (DRAFT_MODEL, "1,1,1,1")):
            self.bench.drafter(name)
            before = session.device.held()
            engine = self.bench.engine(name, speed.shape_of(tree), True, pages)
            found[name] = {
                "memory": {"captures_mib": (session.device.held() - before) / 2**20},
                "host_us": split.phases(engine, texts[0], tokens),
                "profiled": split.launches(session.device, engine, texts[0], tokens),
                "gap": split.gaps(session.device, engine, texts[0], tokens),
            }
        split.show(found)
        session.found["split"] = found
        head = found["eagle3"]
        session.measured["host_gap_us_p50"] = head["gap"].get("p50_us")
        session.measured["host_launches"] = head["profiled"].get("launches")

    def speed(self) -> None:
        """Part e. The model goes afterwards."""
        session, chosen, texts = self.session, self.session.settings, self.texts[: self.session.settings.prompts]
        needs = chosen.patience * 40
        found = list(speed.decode(self.bench, texts, chosen.tokens, session.clock, needs))
        found += speed.replayed(self.bench, texts, chosen.tokens, session.clock, needs)
        speed.show(found)
        session.found["engine"] = speed.as_json(found)
        self._bench = None
