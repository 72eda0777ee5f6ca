"""The bundled models, from their texts to a model card."""
