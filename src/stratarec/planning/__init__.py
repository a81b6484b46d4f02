"""Which table lives in which tier, at which precision, with how much cache.

`make_plan` is the whole of it: `table_load` reads access counts, `memories` measures the machine, `placement` decides.
"""
