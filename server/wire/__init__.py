"""What goes over the wire: one msgspec struct for each body, one module for each API."""
