"""Costs of a step and its parts, measured in one process."""
