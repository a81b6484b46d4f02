"""Teams of threads, and memory that is used again."""
