"""From raw samples to figures, plots, tables and pages."""
