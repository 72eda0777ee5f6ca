"""Decoders with any positional encoding over a paged cache."""
