"""Which requests run in a step, from which token, and how many. No torch, no HTTP."""
