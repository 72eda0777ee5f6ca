"""Weight files, and checksums of the weights in memory."""
