"""The vocabulary of requests and responses that all APIs share: OpenAI's, as msgspec structs; their bounds; errors."""
