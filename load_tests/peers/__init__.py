"""Comparisons with other servers."""
