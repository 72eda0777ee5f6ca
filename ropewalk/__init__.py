"""Serves language models with any positional encoding from a paged KV cache."""
