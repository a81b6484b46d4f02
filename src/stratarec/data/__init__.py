"""From raw logs to a prepared data set, and from there to batches."""
