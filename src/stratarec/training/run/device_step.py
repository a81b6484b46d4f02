"""Where the time of a step goes with the network on a GPU: rows where they are, and rows in the GPU's memory.

Rows are read and updated at the speed of this machine's memories as they were measured, the network runs and vectors
travel at that of the device: as `stratarec doctor --gpu` measured it on this machine, or by the data sheet of a card.
The parts of a step follow one another, for a batch is looked up when the one before has been trained; what brings rows
in runs behind, where there is lookahead. Launches, which small batches and networks wait for, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from stratarec.config.units import readable
from stratarec.data.dataset.dataset import Dataset
from stratarec.errors import ConfigError
from stratarec.kernels.runtime.accelerator import open_device
from stratarec.models.base import build_tables
from stratarec.planning.hot_rows import make_hot_plan
from stratarec.planning.memories import measure_tiers
from stratarec.planning.table_load import describe_tables
from stratarec.recipe import Recipe
from stratarec.training.cluster_steps import calibrate, workload
from stratarec.training.torch_setup import verified


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What a device does, each second, and what it holds."""

    float32_flops: float
    bf16_flops: float
    up_bytes: float
    """From pinned memory."""
    down_bytes: float
    row_bytes: float
    """Of rows of its memory, read at random."""
    memory_bytes: float
    origin: str


_PEAKS = {
    "t4": (8.1e12, 65e12, 16e9, 320e9, 16e9),
    "a10": (31.2e12, 125e12, 32e9, 600e9, 24e9),
    "l4": (30.3e12, 121e12, 32e9, 300e9, 24e9),
    "rtx4090": (82.6e12, 165e12, 32e9, 1008e9, 24e9),
    "a100": (19.5e12, 312e12, 32e9, 2039e9, 80e9),
    "h100": (67e12, 989e12, 64e9, 3350e9, 80e9),
    "h200": (67e12, 989e12, 64e9, 4800e9, 141e9),
}
"""Card -> float32 and 16-bit operations, bytes each way of its PCIe link, bytes of its memory a second; its memory."""
_OF_FLOPS, _OF_LINK, _OF_MEMORY = 0.4, 0.8, 0.5
"""Shares of peaks that are reached: judgements, which `assumed` says."""


def figures_of(name: str) -> DeviceFigures:
    """Of a card by its data sheet, or of a device of this machine as it was measured.

    Raises
    ------
    ConfigError
        When it is neither.
    """
    cards = f"a card of {', '.join(_PEAKS)}"
    if name.lower() in _PEAKS:
        float32, bf16, link, memory, size = _PEAKS[name.lower()]
        return DeviceFigures(
            float32_flops=_OF_FLOPS * float32, bf16_flops=_OF_FLOPS * bf16, up_bytes=_OF_LINK * link,
            down_bytes=_OF_LINK * link, row_bytes=_OF_MEMORY * memory, memory_bytes=size,
            origin=f"{name}: {_OF_FLOPS:.0%} of the operations of its data sheet, {_OF_LINK:.0%} of its PCIe link, "
            f"{_OF_MEMORY:.0%} of its memory's bandwidth; nothing of it was measured",
        )  # fmt: skip
    try:
        if name == "cpu":
            raise ConfigError("--device is cpu, which is what steps are compared with: name a device such as cuda")
        device = open_device(name, "--device")
    except ConfigError as error:
        raise ConfigError(f"{error}; or name {cards}") from None
    found = verified(device)
    if found is None or found.keys() != {field.name for field in fields(DeviceFigures)} - {"origin"}:
        raise ConfigError(f"{name} was not measured here: run `stratarec doctor --gpu {name}`, or name {cards}")
    return DeviceFigures(**found, origin=f"{name}, as `stratarec doctor --gpu` measured it here")


def device_steps(recipe: Recipe, dataset: Dataset, figures: DeviceFigures) -> tuple[list[dict[str, Any]], list[str]]:
    """Seconds of the parts of a step, for each place of network and rows; and what is to be said of them."""
    batch, bf16 = recipe.train.batch_size, recipe.train.precision == "bf16"
    tables = build_tables(recipe.model, dataset.schema, dataset.table_rows())
    plan = make_hot_plan(
        tables, dataset, recipe.train.embedding, recipe.memory, recipe.hot, batch_size=batch,
        tiers=measure_tiers(recipe.memory),
    )  # fmt: skip
    specs = describe_tables(tables, dataset, recipe.train.embedding, batch_size=batch)
    flops = batch * workload(recipe, dataset, None, 1).flops
    vectors = 4 * sum(spec.outputs for spec in specs)
    up, down = vectors + 4 * batch * len(dataset.schema.dense), vectors
    rows = sum(2 * spec.lookups * 4 * spec.shape.width for spec in specs)
    rows += sum(2 * plan[spec.name].distinct * spec.shape.slot_bytes for spec in specs)
    rate = figures.bf16_flops if bf16 else figures.float32_flops
    ids = 4 * sum(spec.lookups for spec in specs)
    steps = [
        _step("CPU", "as planned", plan.step_seconds, 0, flops / calibrate(recipe, dataset).flops_per_second, 0),
        _step("GPU", "as planned", plan.step_seconds, up / figures.up_bytes, flops / rate, down / figures.down_bytes),
        _step("GPU", "GPU", rows / figures.row_bytes, (ids + up - vectors) / figures.up_bytes, flops / rate, 0),
    ]
    size, gain = readable(plan.float32_bytes), steps[1]["step"] / steps[2]["step"]
    advice = f"float32 tables with their state take {size}, "
    if plan.float32_bytes > 0.8 * figures.memory_bytes:
        advice += f"its memory is {readable(round(figures.memory_bytes))}: rows stay where they are"
    else:
        advice += f"fit its memory and would make a step {gain:,.{0 if gain >= 10 else 1}f} times as fast there"
        advice += ": rather keep them there, which TorchRec does and StrataRec does not" if gain > 2 else ""
    return steps, [
        advice,
        f"assumed: {figures.origin}",
        "assumed: the network of the CPU in float32, as it was timed here",
    ]


def _step(network: str, rows: str, look_up: float, up: float, compute: float, down: float) -> dict[str, Any]:
    parts = {"look up, update": look_up, "up": up, "network": compute, "down": down}
    return {"network on": network, "rows": rows, **parts, "step": sum(parts.values())}
