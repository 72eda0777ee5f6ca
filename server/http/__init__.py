"""HTTP as bytes, connections and middleware. Knows nothing of completions."""
