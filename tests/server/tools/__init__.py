"""Tool calls and reasoning, family by family."""
