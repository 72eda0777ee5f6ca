"""What many replicas will do, predicted from what one does."""
