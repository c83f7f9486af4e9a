"""OpenAI's Responses API: requests become chat requests, the model's output becomes items and events, over HTTP and
over a WebSocket that keeps its conversations' KV warm.
"""
