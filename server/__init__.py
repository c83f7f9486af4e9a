"""HTTP, text, processes, wiring and the command line. May import everything below; only ``foresay`` imports it."""
