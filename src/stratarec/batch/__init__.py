"""What flows through every room: bags of ids, distinct values, batches."""
