"""Triton kernels for GPUs, and their callers."""
