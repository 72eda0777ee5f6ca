"""Measures the trained family."""
