"""A client that times what it receives, and what it asks a server besides."""
