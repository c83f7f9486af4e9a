"""OpenAI's Responses API: what is asked becomes a chat, what the model says becomes items and events, over HTTP and
over a WebSocket that keeps its conversations warm.
"""
