"""Serves a GGUF file with xllamacpp, run by its Python: MODEL WAY THREADS CONTEXT SLOTS --port PORT."""

from __future__ import annotations

import sys
import threading


def main() -> None:
    import xllamacpp  # type: ignore[import-not-found]  # not installed with Foresay

    model, way, threads, context, slots, _, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.port = model, int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_ctx, params.n_parallel = int(context), int(slots)
    if way != "plain":
        name = f"COMMON_SPECULATIVE_TYPE_{way.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
