"""Fast equivalents of the layers, and which of them run here."""
