"""Many processes: who holds which rows, and how ids, rows and gradients travel between them."""
