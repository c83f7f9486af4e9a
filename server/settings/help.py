"""What ``--help``, the settings' page and error messages say about each setting."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple, cast

#: Who applies a setting: the engine; the engine, whose text it may change; the server's routes; or each replica, in
#: addition to the engine's.
AppliedBy = Literal["engine", "text", "service", "cluster"]

#: By heading: a setting's name, what stands for its value, who applies it unless that follows from its section, whether
#: its value is secret; and its description.
_TEXT = """
models
  target TARGET (text): bundled, a short name such as smollm2 (foresay models), a directory, a GGUF file, or a Hugging
    Face hub id
  draft DRAFT: what proposes tokens: auto (suffix, and a head or draft model that ships with the target), none, ngram,
    suffix, self (the target in fewer bits, on its own KV cache; self:int4, self:int8), mtp (the layer for further
    tokens in Qwen3.5's checkpoints), the directory or hub id of a draft model or of heads (eagle3:PATH, dflash:PATH,
    medusa:PATH and such), the kind alone of one that ships with the target (draft_model, eagle3), a class of your own
    (package.module:Class, see docs/drafters.md), or several separated by commas
  anyway: draft even with a model of another vocabulary that knows less than half of what a text consists of; launch:
    start the agent even if the model does not suffice for it
  dtype (text): weights and KV cache; auto is bfloat16, or float16 on a GPU and float32 on a processor without bf16
  quantize KIND (text): make the target's weights int8, int4 or fp8 as they are loaded: half or a quarter of the bytes
    to read in each step (as the files have them)
  activations (text): what quantised weights are multiplied with: int8 rounds activations in groups of 32, which is
    faster on a CPU; model leaves them as they are; auto is int8 with weights of 4 bits on a CPU
  kv_dtype (text): the target's KV cache: int8 or fp8 (e4m3), with a scale for each token and head, hold about twice
    as many tokens in the same memory; auto is --dtype
  draft_quantize KIND: --quantize for a draft model
  draft_kv_dtype: --kv-dtype for the KV cache of a draft model or of EAGLE and DFlash heads
  device (text): where the models run; auto is the first GPU if there is one, otherwise the CPU
  graphs: capture whole steps in CUDA graphs at start-up; on a CPU there are none
drafting
  draft_tokens K: draft a chain of K tokens in every step (chosen at each step from measurements)
  draft_tree SHAPE: draft a tree instead: nodes for each depth, for example 3,2,1, or a file of rank paths
  draft_layers LAYERS: the target layers whose inputs an EAGLE or DFlash head reads, such as 2,16,29 (as the head's
    files say)
  draft_vocab N: how many tokens a draft model, an EAGLE or an MTP head has logits of, on a CPU: those said lately; auto
    is 32768 of a vocabulary of at least twice as many, or all in texts that say others; full is all
  draft_growth: dynamic: keep the nodes likeliest to be hit, as many levels and nodes as the tree has; static: keep as
    many at each depth as the tree has there
  draft_history FILE: a file where --draft suffix keeps the answers it searches, across restarts: token ids of
    answers, and of the ends of prompts (forgotten on exit)
memory
  max_seqs N: sequences decoded at the same time
  max_model_len TOKENS: longest prompt plus output in tokens (the model's own limit)
  kv_tokens TOKENS: tokens the KV cache holds (chosen from the free memory)
  page_size TOKENS: tokens in one page of the KV cache
  gpu_memory_utilization SHARE: share of the GPU's memory that the engine may hold: models, KV cache and all (0.9)
  prefix_cache: reuse the KV of prompts that start alike
  kv_disk SIZE: how much of the user's cache directory the KV of prompts and answers may take, so that servers started
    later need not compute it, in files that you alone may read; off: none. The least recently used goes first (a
    tenth of what is free, at most 8GiB; off on a GPU)
  weight_cache: keep packed weights on disk, so that later starts on a CPU read and pack nothing
  weight_cache_bytes BYTES: the most that packed weights on disk may take; the least recently used go first (20 GB)
  threads N: CPU threads (one per physical core)
sampling
  seed S: seed of requests that give none (random)
  temperature T: 0 takes the most likely token (default: as the model recommends, else 0.7; bench: 1)
  top_k K: sample from the K most likely tokens, 0: all (default: as the model recommends)
  top_p P: sample from the most likely tokens that together reach P (default: as the model recommends, else 0.95;
    bench: 1)
  min_p P: leave out tokens less likely than P times the most likely one
  presence_penalty P: subtracted from the logits of tokens already generated
  frequency_penalty P: the same, once for each time they were generated
  repetition_penalty R: above 1, tokens of the prompt and the text so far get less likely
server
  host ADDRESS: address to listen on
  port PORT: port to listen on; 0 takes a free one
  served_model_name NAME: the model's name in the API; may be given several times, answers show the first (the
    target's name, or the last part of its directory). Not for [models.NAME] in the file: those are called NAME
  any_model_name: serve requests whatever model they name; with [models.NAME], the first in the file serves them;
    answers show the real name
  strict_limits: refuse a max_tokens larger than the context leaves or --max-output-tokens allows (else the answer gets
    that many, with a warning)
  keep_client_noise: show the model also what clients put into prompts that changes each time and means nothing to it,
    such as Claude Code's x-anthropic-billing-header (else it is left out, with a warning, so that the KV cache finds
    what follows again)
  max_queue N: requests that may wait for their turn before new ones get 429
  tool_parser: how the model writes tool calls; auto takes it from its chat template
  reasoning_parser: how the model writes its reasoning; auto takes it from its chat template
  drain_seconds SECONDS: after SIGTERM, how long running requests may take to finish
  engine_timeout SECONDS (cluster): kill and restart the engine process if it shows no sign of life (no answer, no CPU
    time, or on a CPU no kernel that ends) for this long; 20 times as long if it is only silent, or loading, a sixth
    (but 5 s) if on a CPU all of that is missing, and a fifteenth if it was stopped (SIGSTOP)
  max_resumes N (cluster): how often a request is resumed in a new engine process after the one that ran it died or
    hung; 0: it fails
  idle_unload TIME: end the engine process of a model after this long without a request (30s, 10m, 2h), which frees
    its memory; the next request waits until it is loaded again (never)
  max_loaded_models N: with [models.NAME] in the file: models loaded at the same time (as many as the memory plan has
    room for)
  access_log: a line on stderr for each request: path, status, time, tokens, key; never text
  log_stats: every 10 s, a line on stderr about what was drafted and accepted, and a warning if speculation does not
    pay
  self_check P: decode this share of the finished requests again without drafts while the server is idle, and count
    those whose tokens differ; 1 is all of them
  ssl_certfile FILE: serve HTTPS with this certificate chain (PEM); needs --ssl-keyfile
  ssl_keyfile FILE: the private key of the certificate (PEM, not encrypted)
access
  api_key KEY (secret): a key that clients must send; may be given several times. Others on this machine can read
    flags: FORESAY_API_KEY or --api-key-file keep it to yourself
  api_key_file FILE: keys with names and limits, hashed; foresay keys new makes entries
  admin_key KEY (secret): the key with which the engine of the running server may be replaced (foresay reload). It can
    be used to load any file: FORESAY_ADMIN_KEY keeps it from others on this machine (no one may)
  cors_origin ORIGIN: let web pages of this origin use the server; may be given several times, * is any page (default:
    none)
limits
  max_requests_per_minute N: requests each key may send in a minute, then 429 (no limit)
  max_output_tokens N: most tokens of an output; who asks for more gets as many, and a warning (the context)
  max_body_bytes BYTES: largest body of a request, and message on a WebSocket (4 MiB, or 32 for each token of the
    context)
  body_timeout SECONDS: refuse with 408 a request whose body takes longer than this to arrive
  request_timeout SECONDS: end a request that takes longer than this with an error (never)
  first_token_timeout SECONDS: end a request that waits longer than this for its first token with 429 (never)
replicas
  replicas N: run this many engines, each in a replica on Ray Serve; 1-4 lets Ray choose by load. Needs the extra
    foresay[ray], see docs/scale.md (one engine, without Ray)
  ray_address ADDRESS: with --replicas: the Ray that runs them, such as auto or 10.0.0.5:6379; replicas that already
    exist are shared (a Ray on this machine, started and ended with the server)
stopping
  max_tokens N: the longest answer, in tokens (default: 256; chat and run: all that the context leaves)
  min_tokens N: fewest tokens to generate
  stop TEXT: stop where this text appears; may be given several times
  ignore_eos: go on past the model's end-of-text token
bench
  rounds N: how often each way of decoding is measured
"""


class About(NamedTuple):
    """What is known of a setting besides its field. secret: its value is never shown."""

    description: str
    group: str
    metavar: str | None = None
    by: AppliedBy | None = None
    secret: bool = False


def entries(text: str) -> Iterator[tuple[str, str]]:
    """The entries of a text, each with its heading: headings are not indented, further lines of an entry twice."""
    heading, entry = "", ""
    for line in text.strip().splitlines():
        if line.startswith("    "):
            entry += f" {line.strip()}"
            continue
        if entry:
            yield heading, entry
        heading, entry = (heading, line.strip()) if line.startswith(" ") else (line, "")
    yield heading, entry


@cache
def about_settings() -> dict[str, About]:
    """All settings, by name."""
    found: dict[str, About] = {}
    for group, entry in entries(_TEXT):
        head, _, description = entry.partition(": ")
        words, _, marks = head.partition(" (")
        name, _, metavar = words.partition(" ")
        known = set(marks.rstrip(")").split(", ")) - {""}
        by = next(iter(known - {"secret"}), None)
        found[name] = About(description, group, metavar or None, cast("AppliedBy | None", by), "secret" in known)
    return found
