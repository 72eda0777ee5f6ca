"""One file for each published architecture: its configuration, and where its weights are."""
