"""Raw values of samples to score: hashes, ids, and features of few rows in one compiled call."""
