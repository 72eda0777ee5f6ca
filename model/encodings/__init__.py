"""One file for each positional encoding; `base` is what all of them implement."""
