"""Which requests are sent, and when."""
