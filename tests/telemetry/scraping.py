"""Reading what ``/metrics`` says, the way others read it."""

from __future__ import annotations

from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Scrape:
    """One reading of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[str, dict[Labels, float]] = {}
        self.types: dict[str, str] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
                self.types[sample.name] = family.type

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the series of a name that have these labels."""
        wanted = set(labels.items())
        return sum(value for have, value in self.samples.get(name, {}).items() if wanted <= have)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The sums of the series of a name by one label."""
        sums: dict[str, float] = {}
        for have, value in self.samples.get(name, {}).items():
            key = dict(have)[label]
            sums[key] = sums.get(key, 0.0) + value
        return sums


async def scraped(url: str, **headers: str) -> Scrape:
    """``/metrics`` of a server."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics", headers=headers) as response:
        assert response.status == 200, await response.text()
        return Scrape(await response.text())


def bench_counters(text: str) -> tuple[dict[str, int], dict[int, int]]:
    """What ``vllm bench serve`` finds in a scrape: names that begin ``vllm:spec_decode`` and end ``_total``, their
    values the last word of the line; drafts, drafted and accepted tokens, and accepted ones by position."""
    counters = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    positions: dict[int, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        if not name.startswith("vllm:spec_decode") or not name.endswith("_total"):
            continue
        value = int(float(rest.split()[-1]))
        if "num_accepted_tokens_per_pos" in name:
            position = int(rest.partition('position="')[2].partition('"')[0])
            positions[position] = positions.get(position, 0) + value
        else:
            counters[name.removeprefix("vllm:spec_decode_").removesuffix("_total")] += value
    return counters, positions


class Sums:
    """What the metrics of responses add up to."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.output = self.drafts = self.drafted = self.accepted = self.choices = 0
        self.lengths: list[int] = []

    def add(self, body: dict[str, Any], choices: int = 1) -> None:
        """A response, or the last chunk of a stream, with ``usage`` and detailed ``metrics``."""
        usage, drafting = body["usage"], body["metrics"]["speculative_decoding"]
        self.choices += choices
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]
        self.output += usage["completion_tokens"]
        self.drafts += drafting["num_spec_steps"]
        self.drafted += drafting["num_draft_tokens"]
        self.accepted += drafting["num_accepted_draft_tokens"]
        self.lengths += drafting["per_step_accepted"]

    def check(self, scrape: Scrape) -> None:
        """The scrape says the same."""
        for prefix in ("foresay:", "vllm:"):
            counts = {
                "spec_decode_num_drafts": self.drafts,
                "spec_decode_num_draft_tokens": self.drafted,
                "spec_decode_num_accepted_tokens": self.accepted,
                "prompt_tokens": self.prompt,
                "prompt_tokens_cached": self.cached,
                "prefix_cache_queries": self.prompt,
                "prefix_cache_hits": self.cached,
                "generation_tokens": self.output,
                "request_success": self.choices,
            }
            assert {name: scrape.sum(f"{prefix}{name}_total") for name in counts} == counts
            positions = scrape.by(f"{prefix}spec_decode_num_accepted_tokens_per_pos_total", "position")
            assert {int(position): value for position, value in positions.items()} == {
                depth: sum(length > depth for length in self.lengths) for depth in range(len(positions))
            }
            assert len(positions) >= max(self.lengths, default=0)
            assert scrape.sum(f"{prefix}time_to_first_token_seconds_count") <= self.choices
            assert scrape.sum(f"{prefix}request_generation_tokens_sum") == self.output
        bench, positions_of_bench = bench_counters(scrape.text)
        assert bench == {
            "num_drafts": self.drafts,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
        }
        assert sum(positions_of_bench.values()) == self.accepted
