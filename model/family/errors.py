"""Errors that end the family's commands."""


class FamilyError(Exception):
    """One sentence: the cause and the next step."""
