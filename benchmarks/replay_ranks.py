"""One of two ranks, started by torchrun, that train the cells with which replayed steps are
compared.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.__main__ import give_everyone_good_memory
from benchmarks.replay import train
from stratarec.data.dataset.dataset import Dataset
from stratarec.distributed.config import DistributedConfig
from stratarec.distributed.measure import collective_times
from stratarec.distributed.mesh import joined
from stratarec.recipe import Recipe
from stratarec.training.forecast import rank_pipeline

SIZE = 1 << 20


def main() -> int:
    settings = json.loads(sys.argv[1])
    runs = []
    with joined(DistributedConfig(exchange="sptt", hosts=2), towers=2) as mesh:
        small, large = (collective_times(mesh.rows, size, 60)[0] for size in (8, SIZE))
        for content in settings["recipes"]:
            recipe = Recipe.from_dict(content)
            flat = recipe.distributed.exchange == "flat"
            torch.manual_seed(0)
            pipeline = rank_pipeline(
                recipe,
                Dataset.open(recipe.data.path),
                replace(mesh, inside=None, between=None) if flat else mesh,
            )
            with closing(pipeline.model.embeddings):
                losses, seconds = train(pipeline, settings["steps"], lambda ahead: None, depth=1)
            runs.append({"losses": losses, "seconds": seconds})
        if mesh.is_first:
            rate = SIZE / max(large - small, 1e-9)
            Path(settings["out"]).write_text(
                json.dumps({"alpha": small, "bytes_per_second": rate, "runs": runs})
            )
    return 0


if __name__ == "__main__":
    give_everyone_good_memory()
    sys.exit(main())
