"""Counting what speculation does, and reporting it: to the page, to Prometheus, to the log.

:class:`~foresay.server.observe.telemetry.telemetry.Telemetry` (``service.telemetry``, one per model) counts as it
happens, on the event loop's thread, with plain numbers; nothing here waits, and nothing is formatted until requested.

What the page requests, all structs of :mod:`foresay.server.observe.telemetry.report`, ready for
``msgspec.json.encode``:

=====================================  ================================================================================
``await telemetry.snapshot()``         ``Snapshot``: ``Server`` (header), ``Live`` (tiles), ``DrafterRates`` of the last
                                       minute and hour (acceptance by drafter and depth), ``Node`` (the tree's places
                                       and how often each was accepted), counters since the start, a verdict in words
``await telemetry.history()``          ``HistoryReport``: a ``Point`` for each active second of the last ten minutes and
                                       each active minute of the last hour, with the bounds of its two histograms
``await telemetry.points(after)``      the ``Point`` of each second behind ``after`` that is over: what a feed sends
``telemetry.requests(tenant)``         ``RequestSummary`` of one key's requests, running and over, the newest first
``telemetry.request(tenant, id)``      ``RequestDetail``: its ``RequestStep`` strip and its text as ``TokenText``
=====================================  ================================================================================

The coroutines work in slices, between which the streams run.

``tenant`` is ``CONTEXT.get().caller.tenant``: texts are shown only to the key that requested them.

What is counted where: a step of the engine once, from its ``StepTrace``; the tokens of each request where its text is
cut (:class:`~foresay.server.observe.telemetry.request_stats.RequestStats`), so that tokens after a stop string count as
discarded and not accepted, as in the response's own ``metrics``. :mod:`foresay.server.observe.telemetry.exposition`
makes ``/metrics``.
"""
