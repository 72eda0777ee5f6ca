"""Options of the commands, and what their help says. No torch."""
