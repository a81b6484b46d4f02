"""What Numba has no words for: registers, bits, prefetches."""
