"""Checkpoints: read, written, or made up at random."""
