"""How long a step of a recipe takes on this machine: its tables as planned, its network and its batches as timed here.

The network is trained for some steps on made-up numbers, and some batches are read, at the size that the recipe asks
for: what a sample costs there is not what it costs at another. Work that runs ahead shares the processor with the step
that trains, so what it takes of a core's time a step takes longer, unless cores are left over.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch

from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.kernels.runtime.cores import cores
from stratarec.planning.plan import Plan, Seconds
from stratarec.planning.table_load import cold_popularity
from stratarec.recipe import Recipe
from stratarec.training.cluster_steps import network_seconds
from stratarec.training.torch_settings import torch_settings
from stratarec.training.trainer import loader_config

_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """Seconds of a step, part by part."""

    tables: Seconds
    network: float
    """Forward, backward and its update."""
    reading: float
    """Of one core, for the next batch."""
    lookahead: int
    threads: int

    @property
    def step(self) -> float:
        """Of all parts together.

        What trains is a chain; what runs ahead is work that all cores share. A block device waits beside both.
        """
        chain = self.tables.compute + self.network
        if not self.lookahead:
            chain += self.tables.staging + self.tables.device
        ahead = self.tables.staging if self.lookahead else 0.0
        busy = ((chain + ahead) * self.threads + self.reading) / max(cores(), self.threads)
        return max(chain, busy, self.tables.device)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON data; times in seconds."""
        return {**asdict(self), "step": self.step}


def forecast(recipe: Recipe, dataset: Dataset, plan: Plan) -> StepForecast:
    """Seconds of a step under `plan`, in one process on the CPU; takes a second or two."""
    batch, threads = recipe.train.batch_size, recipe.train.threads
    with torch_settings(threads=threads):
        network = network_seconds(recipe, dataset, batch, optimizer=True)
        used = torch.get_num_threads()
    loader = Loader(dataset, "train", loader_config(recipe.train, None))
    tables = _of_run(plan, dataset, recipe.train.steps(len(loader)))
    return StepForecast(
        tables=tables, network=network, reading=_reading(loader), lookahead=plan.lookahead, threads=used
    )  # fmt: skip


def _of_run(plan: Plan, dataset: Dataset, steps: int) -> Seconds:
    """Of the tables, in a run of so many steps: the first time that a row comes into a cache, no log has it to read."""
    saved = 0.0
    for placed in plan.tables:
        if placed.tier == "log" and placed.home_reads:
            popularity = cold_popularity(dataset.access_counts(placed.table), placed.hot_rows)
            first = popularity.distinct(placed.lookups * steps) / (placed.home_reads * steps)
            saved += min(first, 1.0) * placed.seconds.device
    whole = plan.seconds
    return replace(whole, device=whole.device - saved)


def _reading(loader: Loader) -> float:
    """Of a batch; the first one waits for files."""
    batches = loader.epoch(0)
    next(batches)
    began = time.perf_counter()
    found = sum(1 for _ in islice(batches, _BATCHES))
    return (time.perf_counter() - began) / max(found, 1)
