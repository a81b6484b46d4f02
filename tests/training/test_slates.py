"""Losses of slates: by a naive reference, in batches that keep slates whole, and refused where they cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from torch.nn import functional

from recipes import assert_same_model, last, tiny
from stratarec.batch.batch import Batch
from stratarec.batch.jagged import KeyedJagged
from stratarec.cli import main
from stratarec.data.dataset import writer as storage
from stratarec.data.dataset.dataset import Dataset
from stratarec.data.loading.loader import Loader, LoaderConfig
from stratarec.training.steps.loss import SLATE_LOSSES, Objective

SLATES = 400


def reference(kind: str, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The mean over clicks, slate by slate."""
    assert batch.slates is not None
    total, weight, first = torch.zeros(()), 0.0, 0
    for size in batch.slates.tolist():
        rows = range(first, first + size)
        first += size
        missed = [row for row in rows if batch.label[row] == 0]
        for click in (row for row in rows if batch.label[row] == 1 and missed):
            scale = 1.0 if batch.weight is None else float(batch.weight[click])
            if kind == "softmax":
                loss = -functional.log_softmax(logits[list(rows)], 0)[click - rows.start]
            else:
                loss = sum(functional.softplus(logits[row] - logits[click]) for row in missed) / len(missed)
            total, weight = total + scale * loss, weight + scale
    return total / weight if weight else total


@pytest.mark.parametrize("kind", list(SLATE_LOSSES))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clicks", [0.0, 0.3, 1.0])
def test_a_loss_of_slates_is_that_of_each_click_among_its_slate(kind: str, weighted: bool, clicks: float) -> None:
    draws = torch.Generator().manual_seed(3)
    sizes = torch.randint(1, 7, (40,), generator=draws)
    count = int(sizes.sum())
    batch = Batch(
        label=(torch.rand(count, generator=draws) < clicks).float(),
        dense=torch.empty(count, 0),
        sparse=KeyedJagged(keys=(), values=torch.empty(0, dtype=torch.int32), offsets=None, batch_size=count),
        weight=torch.randint(0, 3, (count,), generator=draws).float() if weighted else None,
        slates=sizes,
    )
    # As far apart as logits get: e^90 is no float32.
    level = torch.repeat_interleave(torch.linspace(-90, 90, len(sizes)), sizes)
    logits, plain = ((3 * torch.randn(count, generator=draws)).requires_grad_() for _ in range(2))
    plain.data.copy_(logits.data)
    found, wanted = Objective(kind=kind).mean(logits + level, batch), reference(kind, plain, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    if clicks == 0.3:
        found.backward()
        wanted.backward()
        torch.testing.assert_close(logits.grad, plain.grad, rtol=1e-4, atol=1e-6)
        assert logits.grad is not None
        assert logits.grad.abs().max() > 0.01
    else:
        assert found.item() == 0


def content(root: Path, **train: Any) -> dict[str, Any]:
    """A log of slates in which what is clicked is the best of the slate, whatever the slate's level."""
    draws = np.random.default_rng(5)
    sizes = draws.integers(1, 12, SLATES)
    slate = np.repeat(np.arange(SLATES), sizes)
    item, place = draws.integers(0, 40, len(slate)), draws.random(len(slate))
    value = item / 10 + place
    best = np.array([value[slate == each].max() for each in range(SLATES)])
    frame = pl.DataFrame(
        {
            "label": ((value == best[slate]) & (slate % 5 > 0)).astype(int),
            "slate": slate,
            "who": slate // 4,
            "at": slate,
            "item": item,
            "city": slate // 4 % 7,
            "place": place,
        }
    )
    frame.sample(fraction=1, shuffle=True, seed=1).write_parquet(root / "log.parquet")
    loss = {"kind": "softmax", "by": "slate"}
    found = tiny(root, loss=loss, batch_size=32, shuffle_row_groups=3, threads=1, **train)
    schema = {
        "session": "slate",
        "user": "who",
        "time": "at",
        "dense": [{"name": "place"}],
        "sparse": [{"name": "item"}, {"name": "city"}, {"name": "before", "kind": "history", "of": "item"}],
    }
    found["data"]["source"] = {"kind": "parquet", "paths": [str(root / "log.parquet")], "schema": schema}
    found["data"]["shard_samples"] = 700
    return found


@pytest.fixture(scope="module", params=["auto", "none"])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared in small row groups, with groups and without."""
    root = tmp_path_factory.mktemp("slates")
    found = content(root)
    found["data"]["groups"] = request.param
    (root / "r.yaml").write_text(yaml.safe_dump(found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "ROW_GROUP", 150)
        assert main(["prepare", str(root / "r.yaml"), "-q"]) == 0
    return root / "r.yaml"


@pytest.mark.parametrize(("slate", "size"), [("session", 32), ("session", 12), ("user", 48)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_hold_whole_slates_and_every_sample_once(recipe: Path, slate: Any, size: int, shuffle: bool) -> None:
    dataset = Dataset.open(recipe.parent / "data")
    config = LoaderConfig(batch_size=size, slate=slate, shuffle=shuffle, shuffle_row_groups=3, seed=2)
    loader = Loader(dataset, "train", config)
    batches = list(loader.epoch(1))
    assert len(batches) == len(loader)
    log = pl.read_parquet(recipe.parent / "log.parquet")
    column = "slate" if slate == "session" else "who"
    wanted = set(log.group_by(column).agg(pl.col("place").sum().round(4))["place"].to_list())
    mean, deviation = (getattr(dataset.about.moments["place"].moments, name) for name in ("mean", "deviation"))
    seen, orders, cut = 0, [], 0
    for batch in batches:
        assert batch.slates is not None
        assert 0 < batch.slates.sum() == batch.size < 2 * size
        # Undone, the numbers of a slate add up to what they do in the log.
        place = np.expm1(batch.dense[:, 0].double().numpy() * deviation + mean)
        for part in np.split(place, batch.slates.cumsum(0)[:-1].numpy()):
            cut += min(abs(part.sum() - each) for each in wanted) > 1e-3
        seen += batch.size
        orders.append(batch.label)
    assert seen == loader.samples
    # Row groups end with a session where there are groups: of what lies across their borders each part is a slate.
    borders = sum(len(shard.row_groups) - 1 for shard in dataset.shards("train"))
    assert borders > 3
    assert cut <= (0 if slate == "session" and dataset.deduplicated else 2 * borders)
    tail = list(loader.epoch(1, len(batches) // 2))
    assert all(torch.equal(one.label, two) for one, two in zip(tail, orders[len(batches) // 2 :], strict=True))


def test_a_run_by_slates_orders_them_and_is_resumed_to_the_bit(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, fields = recipe.parent, ["train.epochs=6", "train.dense.learning_rate=0.01"]
    assert main(["train", str(recipe), *fields]) == 0
    said = capsys.readouterr()
    told = re.search(r"([\d,]+) slates; (\d+) without a click .*, and (\d+) with one", said.err + said.out)
    assert told is not None
    found = [int(each.replace(",", "")) for each in told.groups()]
    assert found == pytest.approx(_counts(root), abs=0 if Dataset.open(root / "data").deduplicated else 12)
    result = json.loads((root / "run" / "result.json").read_text())
    # Chosen, as the recipe does not say.
    assert len(result["calibration"]) == 1
    assert 0.8 < result["test"]["calibration"] < 1.25
    assert main(["evaluate", str(root / "run"), "--rank-by", "session", "-q"]) == 0
    said_of = capsys.readouterr().out
    mrr = next(float(line.split()[1]) for line in said_of.splitlines() if line.strip().startswith("MRR"))
    assert mrr > 0.75  # 0.43 at random
    once_more = [f"train.run={root / 'twice'}", *fields]
    assert main(["train", str(recipe), *once_more, "train.max_steps=20", "-q"]) == 0
    assert main(["train", str(recipe), *once_more, "--resume", "-q"]) == 0
    assert_same_model(last(root / "run"), last(root / "twice"))


def _counts(root: Path) -> list[int]:
    """Slates of the training split; of several samples without a click and one without, and of one."""
    dataset = Dataset.open(root / "data")
    rows = np.concatenate(list(dataset.row_numbers("train"))) - 1
    log = pl.read_parquet(root / "log.parquet")[rows]
    each = log.group_by("slate").agg(pl.col("label").sum(), pl.len())
    several = each.filter(pl.col("len") > 1)
    silent = several.filter((pl.col("label") == 0) | (pl.col("label") == pl.col("len")))
    return [len(each), len(silent), len(each) - len(several)]
