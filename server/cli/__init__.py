"""The commands of ``foresay``, one file each. Importing them is cheap: torch is imported by the one that runs."""
