"""The float32 row cache over a home, and the thread that stages batches ahead."""
