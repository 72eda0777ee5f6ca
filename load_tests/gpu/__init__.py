"""Decoding on a GPU, beside its memory's limit and `transformers`."""
