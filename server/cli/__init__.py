"""The `ropewalk` command: a file for each of its commands, with its options and what it calls."""
