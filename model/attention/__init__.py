"""Attention over the paged cache: the interface to kernels, and its definition in torch."""
