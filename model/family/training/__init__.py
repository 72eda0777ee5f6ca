"""Trains the family, and packs what was trained."""
