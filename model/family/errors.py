"""What the family's work says when it gives up."""


class FamilyError(Exception):
    """One sentence: the cause and the next step."""
