"""From a CSV file to scores, in Python: what `init`, `prepare`, `train` and `predict` do on the command line."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from make_log import make_log

import stratarec
from stratarec import ClickModel


def main() -> None:
    """Train twice: by a frame, as an estimator; and by a recipe, as for logs of any size."""
    make_log(Path())
    log, tomorrow = pl.read_csv("clicks.csv"), pl.read_csv("tomorrow.csv")

    # A frame in, probabilities out. Fields of a recipe are set by name: train__epochs=3.
    model = ClickModel().fit(log, label="clicked")
    print("as an estimator: AUC", round(model.evaluate(tomorrow)["auc"], 4))

    # The same by a recipe. `stratarec init clicks.csv` drafts one with its reasons.
    Path("clicks.yaml").write_text(RECIPE)
    recipe = stratarec.Recipe.load("clicks.yaml")
    dataset = stratarec.prepare(recipe.data)
    result = stratarec.Trainer(recipe, dataset).train(overwrite=True)
    print("by a recipe: AUC on the last day", round(result["test"]["auc"], 4), "- report: runs/clicks/report.html")


RECIPE = """
name: clicks
data:
  path: data/clicks
  source:
    kind: csv
    paths: [clicks.csv]
    schema:
      label: clicked
      time: time
      time_format: "%Y-%m-%dT%H:%M:%S%.f"
      user: user
      dense: [{name: price, transform: log1p}]
      sparse: [{name: user}, {name: item}, {name: country}, {name: device}]
  split: {by: time, valid: 1d, test: 1d}
model: {kind: deepfm, embedding_dim: 8}
train: {batch_size: 256, epochs: 3}
"""

if __name__ == "__main__":
    main()
