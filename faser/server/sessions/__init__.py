"""Sessions of live video over HTTP: chunks of a stream in, an answer for each window out, as events."""
