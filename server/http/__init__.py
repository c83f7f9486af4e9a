"""The application: routes of all APIs, who is let in, the log of requests, and its own description."""
