"""Studies of an encoding: what it does to the cache, byte by byte."""
