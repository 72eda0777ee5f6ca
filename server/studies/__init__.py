"""What `ropewalk encodings`, `explain`, `audit` and `family` do: studies that need no server."""
