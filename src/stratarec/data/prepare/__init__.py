"""Raw logs -> a prepared data set."""
