"""Trains a recipe in a process of its own and prints the kernels that warming up did not compile or load.

And torch's compiler, if it was imported: it takes a second and 60 MiB.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace

from numba.core.dispatcher import Dispatcher

from stratarec.data.dataset import Dataset
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe
from stratarec.training.run import new_plan
from stratarec.training.trainer import Trainer
from stratarec.training.warmup import warm_up


def compiled() -> set[str]:
    """Every kernel with every type of arguments that it has been called with."""
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), Dispatcher))
    return {f"{one.py_func.__module__}.{one.py_func.__name__}{kind}" for one in found for kind in one.overloads}


def main(path: str, home: str) -> None:
    recipe = Recipe.load(path)
    dataset = Dataset.open(recipe.data.path)
    plan = new_plan(recipe, dataset)
    if home and plan is not None:
        # A planner would not send so few rows to a device.
        second = 64 if home == "log" else 0
        moved = [t if t.tier == "level0" else replace(t, tier=home, level1_rows=second) for t in plan.tables]  # type: ignore[arg-type]
        plan = replace(plan, tables=tuple(moved))
    trainer = Trainer(recipe, dataset, plan=plan)
    warm_up(recipe, trainer.loader, trainer.plan, SilentProgress())
    before = compiled()
    assert any("stratarec.kernels.update" in name for name in before), "nothing was compiled"
    trainer.train()
    found = {name for name in compiled() - before if "stratarec" in name} | {"torch._dynamo"} & sys.modules.keys()
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
