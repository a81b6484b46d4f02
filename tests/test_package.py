"""The public names, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import stratarec


def test_public_names() -> None:
    assert stratarec.__all__ == [
        "Batch", "Dataset", "EmbeddingBagConfig", "InverseJagged", "JaggedTensor", "KeyedJagged", "Loader",
        "LoaderConfig", "PrepareConfig", "Recipe", "RowOptimizerConfig", "StrataError", "TieredEmbeddingBagCollection",
        "Trainer", "prepare",
    ]  # fmt: skip
    assert all(getattr(stratarec, name) for name in stratarec.__all__)


def test_importing_and_help_do_not_load_torch() -> None:
    code = (
        "import sys, stratarec, stratarec.cli; stratarec.cli._parser().format_help(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
