"""A prepared data set -> batches."""
