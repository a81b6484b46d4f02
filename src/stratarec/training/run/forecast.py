"""How long a step of a recipe takes on this machine: its tables as planned, its network as timed here.

The network is trained for some steps on made-up numbers at the size that the recipe asks for, while its loader reads
batches: what a sample costs there is not what it costs at another, and threads of a network that all cores work on wait
for one that reading holds up. So does bringing in rows, unless cores are left over.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count

import torch

from stratarec.batch.batch import Batch
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader
from stratarec.kernels.runtime.cores import cores
from stratarec.planning.plan import Plan, Seconds
from stratarec.planning.table_load import cold_popularity
from stratarec.recipe import Recipe
from stratarec.training.cluster_steps import network_seconds
from stratarec.training.steps.step import loader_config
from stratarec.training.torch_setup import torch_settings


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """Seconds of a step, part by part."""

    samples: int
    """Of a step."""
    tables: Seconds
    network: float
    """Forward, backward and its update, while the loader reads the batches to come."""
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
        busy = (chain + ahead) * self.threads / max(cores(), self.threads)
        return max(chain, busy, self.tables.device)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON data; times in seconds."""
        return {**asdict(self), "step": self.step}


def forecast(recipe: Recipe, dataset: Dataset, plan: Plan) -> StepForecast:
    """Seconds of a step under `plan`, in one process on the CPU; takes a second, and six steps."""
    loader, threads = Loader(dataset, "train", loader_config(recipe.train, None)), recipe.train.threads
    samples = min(recipe.train.batch_size, loader.samples)
    with torch_settings(threads=threads), closing(_forever(loader)) as batches:
        network = network_seconds(recipe, dataset, samples, beside=batches)
        used = torch.get_num_threads()
    tables = _of_run(plan, dataset, recipe.train.steps(len(loader)))
    return StepForecast(samples=samples, tables=tables, network=network, lookahead=plan.lookahead, threads=used)


def _forever(loader: Loader) -> Generator[Batch, None, None]:
    """Batches of epochs without end."""
    for epoch in count():
        with closing(loader.epoch(epoch)) as batches:  # type: ignore[type-var]
            yield from batches


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
