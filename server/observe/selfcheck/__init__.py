"""Is it still so? Texts that were written are decoded again, plainly and from nothing, and compared token by token."""
