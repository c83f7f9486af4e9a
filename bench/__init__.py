"""Benchmarks: inflation, floors, on/off runs side by side, peers, forced draws, the server's share.

Every module is run with ``python -m bench.<name> --help``: ``inflate``, ``floor``, ``decode``, ``overhead``, ``peers``,
``http``, ``forced``, ``report``. Each prints tables for people, then one JSON line, and writes the same to
``bench/results/``. ``bench/toy/`` trains the bundled pair. ``LOG.md`` says what was tried. Nothing imports bench.
"""
