"""OpenAI's wire format: bodies in, requests for the engine; tokens back, answers out."""
