"""Choose a memory tier, a precision and a cache for every table, and predict the time of a step.

`placement.make_hot_plan` is the entry point: `candidates` reads access counts, `machine` measures
the memories, `step_model` predicts seconds, and `solve` chooses.
"""
