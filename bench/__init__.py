"""Benchmarks: ``python -m bench NAME``, or without a name for their list.

An experiment (:mod:`bench.experiment`) declares its variants and cases; one runner measures them in turns, compares
them, prints a table and one JSON line, and writes the same to ``bench/results/``. ``bench/gpu`` has commands of its
own, ``bench/toy`` trains the bundled pair, ``LOG.md`` lists what was tried. Nothing imports bench.
"""


class BadOption(ValueError):
    """An option that cannot be used, in words for its user."""
