"""The OpenAI-compatible server: an HTTP process in front, the engine in a process of its own."""
