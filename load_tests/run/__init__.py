"""Load tests of running servers."""
