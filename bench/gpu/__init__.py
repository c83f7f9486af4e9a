"""Foresay's speed on a GPU: ``python -m bench.gpu``, one command, eight minutes, no network, no weights to fetch."""
