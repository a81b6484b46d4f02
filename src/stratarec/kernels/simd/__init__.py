"""Operations that Numba does not offer: vector registers, bits and prefetches."""
