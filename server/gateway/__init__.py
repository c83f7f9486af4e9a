"""Who may send requests, and how many: keys and limits."""
