"""The HTTP application: one file for each group of routes."""
