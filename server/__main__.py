"""`python -m server` is the `ropewalk` command."""

from server.cli import main

raise SystemExit(main())
