"""Texts that the family is trained on: fetched, cleaned, tokenized, in order."""
