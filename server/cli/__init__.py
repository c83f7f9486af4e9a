"""The commands of ``foresay``. Importing them is cheap: torch is imported only by the one that runs."""

INTERRUPTED = 130
