"""What a user may set, and what the settings stand for. Imports no torch."""
