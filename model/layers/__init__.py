"""What a decoder is made of, in torch: the definition."""
