"""Training in several processes (ranks): placement of rows, and exchange of ids, rows and
gradients.
"""
