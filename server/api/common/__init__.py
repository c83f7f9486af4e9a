"""What all APIs do with a request: check it, prepare it, run it, and write the answer as a stream or a body."""
