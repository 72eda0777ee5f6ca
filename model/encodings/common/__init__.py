"""What several encodings share: rotation, its scaling, costs, and checks of hooks."""
