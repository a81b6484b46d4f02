"""Programs that add an entry to a registry as a package of a user does, and train with it.

A codec or an eviction policy is part of compiled kernels, so it is registered before they are
loaded, in a new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TRAIN = """
import json
from recipes import prepared, tiny
from stratarec.progress import SilentProgress
from stratarec.recipe import Recipe, with_values
from stratarec.training.trainer import Trainer

recipe = Recipe.from_dict(with_values(tiny(Path(sys.argv[1]), epochs=1), json.loads(sys.argv[2])))
result = Trainer(recipe, prepared(recipe.data), SilentProgress()).train()
"""


def train_with(registers: str, tmp_path: Path, changes: str, checks: str) -> str:
    """Run a program that registers an entry, trains a tiny recipe and checks its result; return
    what it prints.

    Parameters
    ----------
    registers, checks : str
        Code before the training, and code after it, which may use `recipe` and `result`.
    changes : str
        Changed fields of the recipe, as JSON.
    """
    program = tmp_path / "program.py"
    program.write_text(f"import sys\nfrom pathlib import Path\n{registers}{_TRAIN}{checks}")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), changes],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
