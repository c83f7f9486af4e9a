"""The words of requests and answers that all APIs share: OpenAI's, as msgspec structs; their bounds; errors."""
