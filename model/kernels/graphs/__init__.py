"""Steps that a device can record once and replay."""
