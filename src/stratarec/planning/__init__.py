"""Which table lives in which tier, at which precision, with how much cache.

`make_plan` is the whole of it: `tables` reads access counts, `tiers` measures the machine, `placement` decides.
"""
