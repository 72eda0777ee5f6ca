"""Attacks a server with drawn requests: scripts/fuzz --help.

A case follows from its kind, a seed and its number, so that any can be drawn again, and a campaign
goes on where it stopped.
"""
