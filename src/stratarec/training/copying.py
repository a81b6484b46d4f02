"""Copies of hot rows in the plan of a run of several processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from stratarec.data.dataset import Dataset
from stratarec.distributed.calibration import Pace
from stratarec.distributed.hot_traffic import Rates, RowWires, flat_step
from stratarec.distributed.machines import Calibration, Cluster
from stratarec.distributed.simulate import StepTime
from stratarec.embedding.codecs import CodecConfig, RecordCodec
from stratarec.hot.parts import Part, parts_of, share_of_accesses, used_bytes
from stratarec.models.base import build_tables
from stratarec.planning.copies import Copies, Ranks, choose_copies, with_copies
from stratarec.planning.plan import Plan
from stratarec.recipe import Recipe
from stratarec.sizes import readable
from stratarec.training.scaling import inside_rate, workload
from stratarec.training.sharing import pooled_tables


def ranks_of(recipe: Recipe, dataset: Dataset, hosts: int, local: int) -> Ranks:
    """What the ranks of a recipe look up."""
    shared = recipe.distributed
    return Ranks(
        hosts=hosts, local=local, batch=max(recipe.train.batch_size // (hosts * local), 1),
        samples=dataset.samples("train"), wires=RowWires(rows=shared.wire, gradients=shared.gradient_wire),
    )  # fmt: skip


def parts_and_widths(recipe: Recipe, dataset: Dataset) -> tuple[list[Part], list[int]]:
    """The parts of all tables, and D of each."""
    widths = {name: recipe.model.table_width(name) for name in dataset.vocabularies}
    optimizer = recipe.train.embedding
    sizes = {name: RecordCodec.of(CodecConfig(), width, optimizer).record_bytes for name, width in widths.items()}
    parts = parts_of(dataset, sizes)
    return parts, [widths[part.table] for part in parts]


def copies_planned(
    plan: Plan, recipe: Recipe, dataset: Dataset, hosts: int, pace: Pace | None = None
) -> Plan:  # fmt: skip
    """The plan with the copies that the recipe asks for.

    Parameters
    ----------
    pace : Pace or None
        Of the ranks at hand; without it ``auto`` copies nothing.
    """
    hot = recipe.hot
    if plan.ranks == 1 or hot.budget is None or hot.copies == "none":
        return plan
    local = plan.ranks // hosts
    parts, widths = parts_and_widths(recipe, dataset)
    if hot.copies == "always":
        found = choose_copies(parts, widths, hot.budget, ranks_of(recipe, dataset, hosts, local), None, 0.0)
        return with_copies(plan, parts, found.rows)
    reason = _cannot(recipe, hosts, local)
    if reason or pace is None:
        return _without(plan, reason or "no network was measured: start it by torchrun")
    rows = pace.row_bytes_per_second
    rates = Rates(min(inside_rate(recipe, local), rows), 1 / max(pace.network.beta, 1e-12), rows)
    ranks = ranks_of(recipe, dataset, hosts, local)
    latency, still = pace.network.latency(plan.ranks - 1), _pooled(recipe, dataset, plan.ranks)
    found = choose_copies(parts, widths, hot.budget, ranks, rates, latency, still)
    if not found.pay:
        return _without(plan, "no step gets shorter by them on the network as it was measured")
    made = with_copies(plan, parts, found.rows)
    return replace(made, notes=(*made.notes, saves(found)))


@dataclass(frozen=True, kw_only=True)
class CopiesPrediction:
    """What copies of hot rows do to a step of the flat exchange of distinct rows on a cluster."""

    rows: int
    """Copied: as many as pay, within `hot.budget` where there is one."""
    bytes: int
    """Of the copies of a rank, weights and optimizer state."""
    accesses: float
    """Share of the training lookups that go to them."""
    sent: float
    """Bytes of rows a step from a host to others, without copies."""
    sent_with: float
    """With them."""
    flat: StepTime
    copied: StepTime
    wire: str
    """Of rows and of gradients."""
    pay: bool
    """Whether a run makes them."""

    @property
    def line(self) -> str:
        """In words."""
        steps = f"{self.flat.total * 1e3:.3g} ms a step by distinct rows in {self.wire}"
        if not self.rows:
            return f"hot rows: {steps}; copies of none would make it shorter"
        return (
            f"hot rows: {steps}, {self.copied.total * 1e3:.3g} ms with copies of {self.rows:,} of them "
            f"({readable(self.bytes)} a rank, {self.accesses:.1%} of the lookups): a host sends "
            f"{self.sent_with / 1e6:.3g} MB of rows a step to others, not {self.sent / 1e6:.3g} MB; they "
            f"{'pay' if self.pay else 'do not pay'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; times in seconds."""
        found = asdict(self)
        for name, step in (("flat", self.flat), ("copied", self.copied)):
            found[name] = {**asdict(step), "step": step.total}
        return found


def predicted_copies(
    recipe: Recipe, dataset: Dataset, cluster: Cluster, calibration: Calibration
) -> CopiesPrediction:  # fmt: skip
    """Steps with copies and without, of the rows that pay."""
    parts, widths = parts_and_widths(recipe, dataset)
    ranks = ranks_of(recipe, dataset, cluster.hosts, cluster.ranks)
    rates = Rates(cluster.inside_bytes_per_second, cluster.between_bytes_per_second, calibration.row_bytes_per_second)
    latency = calibration.between.latency(cluster.all_ranks - 1)
    still = _pooled(recipe, dataset, cluster.all_ranks)
    found = choose_copies(parts, widths, recipe.hot.budget, ranks, rates, latency, still)
    work, rows = workload(recipe, dataset, None, cluster.all_ranks), found.rows
    flat, copied = (
        flat_step(cluster, work, calibration, [flows], copies=copies)
        for flows, copies in ((found.flat, False), (found.copied, bool(rows.any())))
    )
    return CopiesPrediction(
        rows=int(rows.sum()), bytes=used_bytes(parts, rows), accesses=share_of_accesses(parts, rows),
        sent=float(found.flat.between), sent_with=float(found.copied.between), flat=flat, copied=copied,
        wire=" and ".join(dict.fromkeys((ranks.wires.rows, ranks.wires.gradients))),
        pay=found.pay,
    )  # fmt: skip


def saves(copies: Copies) -> str:
    """What copies save, in words."""
    before, after = (float(np.asarray(flows.between)) / 1e6 for flows in (copies.flat, copies.copied))
    return (
        f"with copies a host sends {after:.3g} MB of rows a step to others, without {before:.3g} MB; steps get "
        f"{copies.saved_seconds * 1e3:.3g} ms shorter"
    )


def _cannot(recipe: Recipe, hosts: int, local: int) -> str:
    """Why ``auto`` copies nothing, whatever the network; empty where it may."""
    if hosts == 1 or local == 1:
        return "they save bytes between hosts of several ranks alone"
    if recipe.distributed.by_towers(recipe.towers, hosts):
        return "by towers no row leaves its host"
    if recipe.train.embedding.clocked:
        return "every step changes all rows"
    return ""


def _pooled(recipe: Recipe, dataset: Dataset, ranks: int) -> frozenset[str]:
    """Tables of which bags travel: copies would let rows travel in their place."""
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    return pooled_tables(recipe, dataset, tables, ranks)


def _without(plan: Plan, reason: str) -> Plan:
    return replace(plan, notes=(*plan.notes, f"no copies of hot rows: {reason}"))
