"""Hot rows: which rows are worth fast memory, and which inputs need no others (FAE, arXiv 2103.00686)."""
