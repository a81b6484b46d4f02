"""Raw values of samples to score: their hashes, their ids, and the features of a few rows in one
compiled call.
"""
