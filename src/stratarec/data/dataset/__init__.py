"""A prepared data set on disk."""
