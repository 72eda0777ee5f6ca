"""Pictures of an encoding."""
