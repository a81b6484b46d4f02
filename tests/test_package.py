"""Test the public names, the cost of imports, and the requirements of the package."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import stratarec
from recipes import prepared, tiny
from stratarec.models.registry import MODELS, score_of
from stratarec.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
EXTRAS = PROJECT["project"]["optional-dependencies"]
OWN = [
    Requirement(line)
    for name in ("baseline", "gpu", "mlflow", "onnx", "ray", "tune", "wandb")
    for line in EXTRAS[name]
]
"""Requirements of the extras that are parts of the project."""
OTHERS = [
    Requirement(line) for lines in [PROJECT["build-system"]["requires"], *EXTRAS.values()] for line in lines
]
# Modules whose distribution has another name, and modules that are imported only if they are
# installed.
DISTRIBUTIONS = {"yaml": "pyyaml", "mlflow": "mlflow-skinny"}
OPTIONAL = {"IPython", "torchrec", "hypothesis", "pytest", "sklearn"}


def test_public_names() -> None:
    assert stratarec.__all__ == [
        "Batch",
        "ClickModel",
        "Dataset",
        "EmbeddingBagConfig",
        "InverseJagged",
        "JaggedTensor",
        "KeyedJagged",
        "Loader",
        "LoaderConfig",
        "PrepareConfig",
        "Recipe",
        "RowOptimizerConfig",
        "Scorer",
        "StrataError",
        "TieredEmbeddingBagCollection",
        "Trainer",
        "prepare",
    ]
    assert all(getattr(stratarec, name) for name in stratarec.__all__)


def test_importing_and_help_do_not_load_torch() -> None:
    code = (
        "import sys; from stratarec.cli.run_command import make_parser; make_parser().format_help(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("requirement", [*NEEDED, *OTHERS], ids=str)
def test_every_requirement_has_a_lowest_and_a_highest_version(requirement: Requirement) -> None:
    """`make test-versions` tests both. Only the project's own extras have no version."""
    bounds = [] if requirement.name == "stratarec" else [">=", "<"]
    assert sorted(clause.operator for clause in requirement.specifier) == sorted(bounds)


def test_every_import_is_a_requirement() -> None:
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - sys.stdlib_module_names - OPTIONAL - {"stratarec"}
    assert {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in foreign} <= {
        each.name for each in (*NEEDED, *OWN)
    }


def test_the_map_of_the_code_names_existing_files() -> None:
    """It may name the end of a path if a drawing has named the folder."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")]
    named = set(re.findall(r"(?<![\w>*/])\w[\w/]*\.py\b", re.sub(r"tests/\w+\.py", "", text)))
    assert len(named) > 80
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    lines = text.splitlines()
    assert len(lines) <= 250
    assert max(map(len, lines)) <= 100
    table = text.partition("\n| library |")[2]
    assert not [
        each.name for each in {*NEEDED, *OWN} if not re.search(rf"\| (.*, )?{each.name}(,.*)? \|", table)
    ]


def test_links_between_pages_lead_somewhere_and_files_have_one_version() -> None:
    spec = importlib.util.spec_from_file_location("release_check", ROOT / "tools" / "release_check.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert [*tool.link_faults(), *tool.version_faults(tool.project()["version"])] == []
    assert [*tool.version_faults("9.9.9")] != []


def loaded_libraries(command: list[str], folder: Path) -> str:
    """Run a command. Return its exit code and which of the slow libraries, and of LightGBM, it
    loaded.
    """
    libraries = "sorted({'torch', 'numba', 'sklearn', 'lightgbm'} & {*sys.modules})"
    code = f"import sys; from stratarec.cli import main; print(main({command}), {libraries})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=folder, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1]


def test_init_and_prepare_load_neither_torch_nor_numba(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user,item,click\n" + "1,10,0\n2,20,1\n3,10,1\n" * 40)
    assert loaded_libraries(["init", "log.csv"], tmp_path) == "0 []"
    assert loaded_libraries(["prepare", "log.yaml"], tmp_path) == "0 []"


def test_a_log_with_dates_loads_lightgbm_alone(tmp_path: Path) -> None:
    """`init` fits LightGBM, which imports scikit-learn if it can. Dates are text, which is no
    reason to load Numba.
    """
    assert importlib.util.find_spec("sklearn")
    rows = [
        f"{row % 50},2024-03-{1 + row // 288:02} "
        f"{row // 12 % 24:02}:{5 * (row % 12):02}:00,{int(row % 3 == 0)}"
        for row in range(3000)
    ]
    (tmp_path / "log.csv").write_text("\n".join(["user,time,click", *rows, ""]))
    assert loaded_libraries(["init", "log.csv"], tmp_path) == "0 ['lightgbm']"
    assert loaded_libraries(["prepare", "log.yaml"], tmp_path) == "0 []"


def test_checking_a_data_set_does_not_load_torch(tmp_path: Path) -> None:
    prepared(Recipe.from_dict(tiny(tmp_path)).data)
    assert "torch" not in loaded_libraries(["check", "data"], tmp_path)


def test_settings_match_the_code() -> None:
    """Settings are read without the modules that need torch, so each model names its settings
    twice.
    """
    assert all(score_of(kind).config is config for kind, (config, _) in MODELS.items())


def test_ctrl_c_while_commands_load_is_one_line() -> None:
    code = (
        "import sys; from stratarec.cli import main\n"
        "class Loader:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'stratarec.cli.run_command':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Loader())\n"
        "sys.exit(main(['compare', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "stratarec: interrupted\n")
