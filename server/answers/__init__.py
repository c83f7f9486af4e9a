"""The shapes of an answer: one module for each API. An answer owns its choices and turns their pieces into chunks."""
