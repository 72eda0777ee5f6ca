"""Serves models over HTTP: requests become steps, steps become streamed tokens."""
