"""Test a wire format of another package: two ranks train with it, and it is listed with the
others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed.ranks import Ranks

from errors import refuses
from recipes import prepared, tiny
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.mesh import Mesh
from stratarec.distributed.wire_formats import WIRES, WireFormat
from stratarec.embedding.config import CodecConfig
from stratarec.errors import ConfigError
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.trainer import Trainer

INT4 = WireFormat(
    about="relative error 6 %", codec=lambda: CodecConfig(kind="int4", state="bf16"), scaled=True
)


def train(mesh: Mesh, content: dict[str, Any]) -> tuple[float, int]:
    """Register the format as a package does, and return the test log loss and the bytes that this
    rank sent.
    """
    if content["distributed"]["wire"] == "int4":
        WIRES.register("int4", INT4)
    try:
        recipe = Recipe.from_dict(content)
        trainer = Trainer(recipe, Dataset.open(recipe.data.path), SilentProgress(), mesh=mesh)
        loss = trainer.train()["test"]["log_loss"]
    finally:
        WIRES.pop("int4", None)
    return loss, sum(channel.sent_bytes for channel in mesh.channels)


@pytest.mark.slow
def test_ranks_train_with_a_wire_of_a_package(tmp_path: Path, ranks: Ranks) -> None:
    content = tiny(tmp_path, epochs=1, batch_size=120)
    prepared(Recipe.from_dict(content).data)
    losses, sizes = {}, {}
    for wire in ("fp32", "int4"):
        changes = {"distributed": {"wire": wire, "gradient_wire": wire}, "train.run": str(tmp_path / wire)}
        losses[wire], sizes[wire] = ranks.run(2, train, with_values(content, changes))[0]
    assert losses["int4"] == pytest.approx(losses["fp32"], abs=0.03)
    assert losses["int4"] != losses["fp32"]
    assert sizes["int4"] < sizes["fp32"]


def test_a_wire_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigError, "distributed.wire int4 fp32 fp16 bf16 int8"):
        Recipe.from_dict(with_values(tiny(tmp_path), {"distributed.wire": "int4"}))
    with refuses(ConfigError, "distributed.dense_wire int8 fp32 bf16"):
        Recipe.from_dict(with_values(tiny(tmp_path), {"distributed.dense_wire": "int8"}))
