"""The `ropewalk` command and its subcommands."""
