"""The paged KV cache: blocks, who holds them, what they contain, and whether it changed."""
