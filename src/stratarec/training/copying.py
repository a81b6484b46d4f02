"""Copies of hot rows in the plan of a run of several processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stratarec.data.dataset import Dataset
from stratarec.distributed.calibration import NetworkFigures
from stratarec.distributed.hot_traffic import Rates, RowWires
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.planning.copies import Copies, Ranks, choose_copies, parts_and_widths, with_copies
from stratarec.planning.plan import Plan
from stratarec.planning.tiers import measure_tiers
from stratarec.recipe import Recipe
from stratarec.training.workloads import inside_rate


def ranks_of(recipe: Recipe, dataset: Dataset, hosts: int, local: int) -> Ranks:
    """What the ranks of a recipe look up."""
    shared = recipe.distributed
    return Ranks(
        hosts=hosts, local=local, batch=max(recipe.train.batch_size // (hosts * local), 1),
        samples=dataset.samples("train"), wires=RowWires(rows=shared.wire, gradients=shared.gradient_wire),
    )  # fmt: skip


def row_bytes_of(recipe: Recipe, plan: Plan) -> dict[str, int]:
    """Table -> weights and optimizer state of a row."""
    optimizer = recipe.train.embedding
    return {
        table.table: RecordCodec.of(CodecConfig(), table.width, optimizer).record_bytes for table in plan.tables
    }  # fmt: skip


def copies_planned(
    plan: Plan, recipe: Recipe, dataset: Dataset, hosts: int, network: NetworkFigures | None = None
) -> Plan:  # fmt: skip
    """The plan with the copies that the recipe asks for.

    Parameters
    ----------
    network : NetworkFigures or None
        As measured; without them ``auto`` copies nothing.
    """
    hot = recipe.hot
    if plan.ranks == 1 or hot.budget is None or hot.copies == "none":
        return plan
    local = plan.ranks // hosts
    parts, widths = parts_and_widths(dataset, plan, row_bytes_of(recipe, plan))
    if hot.copies == "always":
        found = choose_copies(parts, widths, hot.budget, ranks_of(recipe, dataset, hosts, local), None, 0.0)
        return with_copies(plan, parts, found.rows)
    reason = _cannot(recipe, hosts, local, network)
    if reason or network is None:
        return _without(plan, reason)
    rates = Rates(
        inside_rate(recipe, local), 1 / max(network.beta, 1e-12), measure_tiers(recipe.memory).dram.row_bytes_per_second
    )
    ranks = ranks_of(recipe, dataset, hosts, local)
    found = choose_copies(parts, widths, hot.budget, ranks, rates, network.latency(plan.ranks - 1))
    if not found.rows.any() or found.saved_seconds <= 0:
        return _without(plan, "no step gets shorter by them on the network as it was measured")
    made = with_copies(plan, parts, found.rows)
    return replace(made, notes=(*made.notes, saves(found)))


def saves(copies: Copies) -> str:
    """What copies save, in words."""
    before, after = (float(np.asarray(flows.between)) / 1e6 for flows in (copies.flat, copies.copied))
    return (
        f"with copies a host sends {after:.3g} MB of rows a step to others, without {before:.3g} MB; steps get "
        f"{copies.saved_seconds * 1e3:.3g} ms shorter"
    )


def _cannot(recipe: Recipe, hosts: int, local: int, network: NetworkFigures | None) -> str:
    """Why ``auto`` copies nothing, whatever the network; empty where it may."""
    if hosts == 1 or local == 1:
        return "they save bytes between hosts of several ranks alone"
    if recipe.distributed.by_towers(recipe.towers, hosts):
        return "by towers no row leaves its host"
    if recipe.train.embedding.clocked:
        return "every step changes all rows"
    return "" if network is not None else "no network was measured: start it by torchrun"


def _without(plan: Plan, reason: str) -> Plan:
    return replace(plan, notes=(*plan.notes, f"no copies of hot rows: {reason}"))
