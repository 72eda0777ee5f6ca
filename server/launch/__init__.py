"""Everything between a configuration and a running server."""
