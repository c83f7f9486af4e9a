"""Requests of other APIs, put into the words of a chat request, and errors put back into theirs."""
