"""Who may ask, and how much: keys, limits, origins."""
