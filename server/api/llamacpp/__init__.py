"""What clients of llama.cpp's server need besides OpenAI's API."""
