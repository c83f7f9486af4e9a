"""Counting what speculation does, and reporting it: to the page, to Prometheus, to the log.

::

    records that count (fields.py: how a metric is declared beside its field)

    counters.py   a model's steps, tokens and requests ──┐
    records.py    connections, starts, re-runs, gauges ──┼── exposition.py   /metrics
                                                         │
    ring.py       the counters once a second ────────────┼── report.py       the page's JSON
                                                         └── verdict.py, log.py

:class:`~foresay.server.metrics.telemetry.Telemetry` (``service.telemetry``, one per model) counts as it
happens, on the event loop's thread, with plain numbers; nothing here waits, and what takes long is done in slices,
between which the streams run. ``tenant`` is ``CONTEXT.get().caller.tenant``: texts are shown only to the key that
requested them.

A step of the engine is counted once, from its ``StepTrace``; the tokens of each request where its text is cut
(:class:`~foresay.server.metrics.telemetry.RequestStats`), so that tokens after a stop string count as
discarded and not accepted, as in the response's own ``metrics``.
"""
