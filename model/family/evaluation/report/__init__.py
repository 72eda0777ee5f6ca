"""The model card: figures, tables and findings of an evaluation."""
