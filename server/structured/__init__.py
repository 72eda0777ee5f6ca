"""Answers that satisfy a grammar: a JSON schema, a regular expression, a list of choices."""
