"""Models, one file per paper."""
