"""Processes for foreign work, with few rights and firm limits."""
