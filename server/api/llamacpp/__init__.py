"""What clients of llama.cpp's server and of LM Studio need besides OpenAI's API."""
