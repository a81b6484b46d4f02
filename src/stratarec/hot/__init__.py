"""Hot rows: choose the rows that are worth fast memory, and find the inputs that need no other
rows.

The method is FAE's (arXiv 2103.00686).
"""
