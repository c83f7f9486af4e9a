"""What being watched costs: ``python -m bench.watched``. Starts servers of its own.

Rounds of the same requests, one after the other, streamed in two ways, whichever comes first in turns::

    off    nobody watches
    on     provenance of every token asked for, a reader on the page's feed, a scrape of /metrics every second, and a
           server with --trace

A round's ratio is tokens per second on over off. Whether a trace is written is decided when a server starts: so there
are two servers, of which one works at a time. One of two equal processes may be some percent faster as long as it
lives, so there are several such pairs, one after the other. Reader and scraper take bytes off their sockets and look at
none of them; with ``--deaf`` the reader of the feed asks for all that the server remembers and takes nothing. Both ways
must say the same text.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import prompts, record
from bench.http import Answer, ServerFailed, exchange, server
from bench.stats import paired_ratio, spread

SCRAPE_SECONDS = 1.0
#: So little that a feed which is not read is soon stuck.
DEAF_BYTES = 4096


class Watcher:
    """Reads the feed and scrapes /metrics in threads of its own. taken: bytes of both; scrapes: how many."""

    def __init__(self, port: int, deaf: bool) -> None:
        self.feed_bytes = self.scrapes = self.scrape_bytes = 0
        self._port, self._deaf = port, deaf
        self._over = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the context is open."""
        self._over.clear()
        with self._feed() as feed:
            threads = [threading.Thread(target=self._scrape)]
            threads += [] if self._deaf else [threading.Thread(target=self._read, args=(feed,))]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._over.set()
                with suppress(OSError):  # a server that was not listened to has hung up
                    feed.shutdown(socket.SHUT_RDWR)
                for thread in threads:
                    thread.join()

    def _feed(self) -> socket.socket:
        """A connection on which the feed comes."""
        since = 0 if self._deaf else int(time.time())
        connection = socket.socket()
        if self._deaf:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, DEAF_BYTES)
        connection.connect(("127.0.0.1", self._port))
        connection.sendall(b"GET /dashboard/feed?since=%d HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % since)
        return connection

    def _read(self, feed: socket.socket) -> None:
        while piece := feed.recv(1 << 16):
            self.feed_bytes += len(piece)

    def check(self) -> None:
        """Somebody watched, or the ratio says nothing."""
        if not self.scrapes or not (self._deaf or self.feed_bytes):
            raise ServerFailed(f"nobody watched: {self.scrapes} scrapes, {self.feed_bytes} bytes of the feed")

    def _scrape(self) -> None:
        """Half a period after the beginning, and then every period."""
        patience = SCRAPE_SECONDS / 2
        while not self._over.wait(patience):
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
                first = connection.recv(1 << 16)
                self.scrapes += first.startswith(b"HTTP/1.1 200")
                self.scrape_bytes += len(first)
                while piece := connection.recv(1 << 16):
                    self.scrape_bytes += len(piece)
            patience = SCRAPE_SECONDS


@contextmanager
def servers(flags: list[str], plain_first: bool) -> Iterator[tuple[int, int]]:
    """The ports of two servers: for off, and for on, which writes a trace."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        tracing = [*flags, "--trace", str(Path(folder) / "trace")]
        first, second = (stack.enter_context(server(own)) for own in _ordered(flags, tracing, plain_first))
        yield (first, second) if plain_first else (second, first)


def _ordered(plain: list[str], tracing: list[str], plain_first: bool) -> tuple[list[str], list[str]]:
    return (plain, tracing) if plain_first else (tracing, plain)


def answers(port: int, asked: list[dict[str, Any]], **more: Any) -> list[Answer]:
    """One request after the other."""
    return [exchange(port, body | more) for body in asked]


def measure(
    plain: int, watched: int, watcher: Watcher, args: argparse.Namespace, begin: int
) -> list[list[tuple[Answer, Answer]]]:
    """The (on, off) answers of every round, the first round thrown away. begin: the number of the first one."""
    texts = [prompt.text for prompt in prompts.load(args.prompts, args.limit)]
    rounds = []
    for number in range(begin, begin + args.rounds + 1):
        common = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed + number}
        asked = [{"prompt": text, "ignore_eos": True, "stream": True} | common for text in texts]
        pair: dict[bool, list[Answer]] = {}
        for on in (number % 2 == 0, number % 2 == 1):
            if on:
                with watcher.watching():
                    pair[on] = answers(watched, asked, provenance=True)
            else:
                pair[on] = answers(plain, asked)
        check_same(pair[True], pair[False])
        rounds.append(list(zip(pair[True], pair[False], strict=True)))
    return rounds[1:]


def check_same(on: list[Answer], off: list[Answer]) -> None:
    """Both said the same, or something is wrong with the server."""
    for watched, plain in zip(on, off, strict=True):
        if watched.text != plain.text:
            raise ServerFailed(f"watched and not watched differ:\n{watched.text}\n{plain.text}")


def summarise(rounds: list[list[tuple[Answer, Answer]]], max_tokens: int) -> dict[str, Any]:
    """ratio: tokens per second on over off, with the interval over the prompts; ratio_per_round: its quartiles."""
    seconds = [[sum(one[way].seconds for one in answered) for way in (0, 1)] for answered in rounds]
    tokens = max_tokens * len(rounds[0])
    prompts_of = enumerate(zip(*rounds, strict=True))
    by_prompt = {str(number): [(off.seconds, on.seconds) for on, off in pairs] for number, pairs in prompts_of}
    return {
        "tokens_per_s_on": spread([tokens / on for on, _ in seconds]),
        "tokens_per_s_off": spread([tokens / off for _, off in seconds]),
        "ratio": paired_ratio(by_prompt),
        "ratio_per_round": spread([off / on for on, off in seconds]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.watched", description="Watched against not watched.")
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft", help="the draft model's directory; by default the server chooses")
    parser.add_argument("--deaf", action="store_true", help="the reader of the feed never reads")
    parser.add_argument("--starts", type=int, default=6, help="pairs of servers")
    parser.add_argument("--rounds", type=int, default=2, help="rounds with each pair")
    parser.add_argument("--limit", type=int, default=6, help="prompts in a round")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--no-save", action="store_true", help="do not write to bench/results/")
    args = parser.parse_args()
    flags = [args.target, "--threads", str(args.threads), "--no-prefix-cache", "--no-log-stats"]
    flags += ["--draft", args.draft] if args.draft else []
    rounds, watchers = [], []
    for start in range(args.starts):
        with servers(flags, plain_first=start % 2 == 0) as (plain, watched):
            watchers.append(Watcher(watched, args.deaf))
            rounds += measure(plain, watched, watchers[-1], args, start * (args.rounds + 1))
            watchers[-1].check()
    summary = summarise(rounds, args.max_tokens)
    record.table("watched against not watched", ["figure", "value"], [[k, v] for k, v in summary.items()])
    names = {"target": Path(args.target).name, "draft": Path(args.draft).name if args.draft else "auto"}
    watching = {
        "trace": True,
        "feed": "deaf" if args.deaf else "read",
        "feed_bytes": sum(watcher.feed_bytes for watcher in watchers),
    }
    watching |= {name: sum(getattr(watcher, name) for watcher in watchers) for name in ("scrapes", "scrape_bytes")}
    shape = {name: getattr(args, name) for name in ("starts", "rounds", "limit", "max_tokens", "temperature", "seed")}
    record.finish(
        "watched", {**names, **shape, "server_threads": args.threads, **watching, **summary}, not args.no_save
    )


if __name__ == "__main__":
    main()
