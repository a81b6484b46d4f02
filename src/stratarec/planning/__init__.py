"""Which table lives in which tier, at which precision, with how much cache."""
