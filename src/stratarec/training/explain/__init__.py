"""What a model goes by: which features matter, what one score comes from, and how numbers bend it."""
