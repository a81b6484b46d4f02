"""Teams of threads, reusable memory, and the network's device."""
