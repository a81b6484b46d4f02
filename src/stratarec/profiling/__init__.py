"""What a data set is like before a model sees it."""
