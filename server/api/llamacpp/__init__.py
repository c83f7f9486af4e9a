"""What clients of llama.cpp's server and of LM Studio ask for besides OpenAI's API."""
