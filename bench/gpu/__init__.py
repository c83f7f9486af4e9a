"""What a GPU makes of Foresay: ``python -m bench.gpu``, one command, eight minutes, no network, no weights to fetch."""
