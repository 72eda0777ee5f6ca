"""Comparisons with other servers, and with another load generator."""
