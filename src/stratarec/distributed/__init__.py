"""Training in several processes (ranks): placement of rows; exchange of ids, rows and gradients."""
