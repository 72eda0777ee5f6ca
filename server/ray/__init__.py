"""Ropewalk on Ray Serve: replicas of the whole server, and what Ray's proxy is told."""
