"""What all load tests share. No HTTP."""
