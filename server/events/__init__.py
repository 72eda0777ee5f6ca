"""KV events: tells other programs which prefixes a cache holds, in vLLM's format."""
