"""Tool calls and reasoning: how families write them, told to a model and read in its answers."""
