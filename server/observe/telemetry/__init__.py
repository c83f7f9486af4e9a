"""Counting what speculation does, and reporting it: to the page, to Prometheus, to the log.

:class:`~foresay.server.observe.telemetry.telemetry.Telemetry` (``service.telemetry``, one per model) counts as it
happens, on the event loop's thread, with plain numbers; nothing here waits, and nothing is formatted until requested.

What the page and its feed request are structs of :mod:`foresay.server.observe.telemetry.report`, ready for
``msgspec.json.encode``. The coroutines work in slices, between which the streams run. ``tenant`` is
``CONTEXT.get().caller.tenant``: texts are shown only to the key that requested them.

What is counted where: a step of the engine once, from its ``StepTrace``; the tokens of each request where its text is
cut (:class:`~foresay.server.observe.telemetry.request_stats.RequestStats`), so that tokens after a stop string count as
discarded and not accepted, as in the response's own ``metrics``. :mod:`foresay.server.observe.telemetry.exposition`
makes ``/metrics``.
"""
