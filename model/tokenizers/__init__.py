"""Text to tokens and back, for every format of vocabulary."""
