"""A log of clicks alone, as news portals have: items that were clicked by others are drawn as negatives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

import stratarec


def make_clicks(path: Path, clicks: int = 6_000) -> None:
    """Sessions of users who stay with a topic; articles of a topic are numbered 0 to 39 within it."""
    random = np.random.default_rng(1)
    session = np.sort(random.integers(0, clicks // 4, clicks))
    user = np.random.default_rng(2).integers(0, 500, clicks // 4 + 1)[session]
    topic = np.where(random.random(clicks) < 0.85, user % 10, random.integers(0, 10, clicks))
    article = 40 * topic + random.zipf(1.4, clicks) % 40
    start = np.datetime64("2026-05-01", "ms").astype(np.int64)
    time = start + session * 240_000 + np.arange(clicks) % 60 * 1_000
    pl.DataFrame({"user": user, "session": session, "article": article, "time": time}).sort("time").write_parquet(path)


def main() -> None:
    """Prepare, train, test on the last day."""
    make_clicks(Path("clicks.parquet"))
    Path("news.yaml").write_text(RECIPE)
    recipe = stratarec.Recipe.load("news.yaml")
    dataset = stratarec.prepare(recipe.data)
    print({split: dataset.samples(split) for split in dataset.splits})
    result = stratarec.Trainer(recipe, dataset).train(overwrite=True)
    print("AUC of clicks against articles that others read then:", round(result["test"]["auc"], 4))


RECIPE = """
name: news
data:
  path: data/news
  source:
    kind: clicks
    paths: [clicks.parquet]
    user: user
    session: session
    item: article
    time: time
    time_unit: ms
    negatives: 4
    history_length: 20
  split: {by: time, valid: 12h, test: 12h}
model: {kind: dlrm, embedding_dim: 8, bottom_mlp: [16], top_mlp: [32]}
train: {batch_size: 256, epochs: 2}
"""

if __name__ == "__main__":
    main()
