"""The rooms: who may import whom, what may import torch, and how long a module and a function may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import launcher

ROOT = Path(launcher.__file__).parent
MODULES = {
    ".".join(("launcher", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

GROUND = {"errors", "run_dir", "outcome", "process", "checkpoints", "lock", "slurm_job"}
MAY_IMPORT = {
    "errors": set(),
    "run_dir": {"errors"},
    "outcome": {"errors", "run_dir", "checkpoints"},
    "process": {"errors"},
    "checkpoints": {"errors", "run_dir"},
    "lock": {"errors", "run_dir"},
    "slurm_job": set(),
    "config": GROUND,
    "plan": GROUND | {"config"},
    "observe": GROUND | {"config"},
    "report": GROUND | {"config", "observe"},
    "submit": GROUND | {"config", "plan", "observe"},
    "sweep": GROUND | {"config", "plan", "observe", "report", "prepare", "resume", "submit"},
    "tasks": GROUND,
    "optim": GROUND,
    "models": GROUND,
    "data": GROUND,
    "train": GROUND | {"config", "plan", "observe", "tasks", "models", "data", "optim"},
}
"""What each room may import beside itself. Modules outside the rooms are commands and may import any of them."""

WITHOUT_TORCH = (
    "config",
    "plan",
    "submit",
    "sweep",
    "report",
    "cli",
    "commands",
    "prepare",
    "run_commands",
    "export",
    "verify",
    "resume",
    "ending",
    "run_dir",
    "checkpoints",
    "lock",
    "slurm_job",
    "errors",
)
"""Rooms and modules that are imported where torch may be absent or would be slow to load."""
WITHOUT_TORCH_TOO = ("launcher.observe.progress", "launcher.observe.plot", "launcher.observe.status")


def room(module: str) -> str:
    """`config` for launcher.config.compose; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imported(path: Path) -> Iterator[str]:
    """The launcher's modules that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "launcher")
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which room it reaches into"
            if node.module == "launcher":
                yield from (f"launcher.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("launcher."):
                yield node.module


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_room_has_its_place() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= MAY_IMPORT.keys(), "a new room says here what it may import"


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_imports_point_one_way(name: str) -> None:
    inside = {module: path for module, path in MODULES.items() if room(module) == name}
    assert inside
    allowed = MAY_IMPORT[name] | {name, "__version__"}
    wrong = [
        f"{module} imports {other}"
        for module, path in inside.items()
        for other in imported(path)
        if room(other) not in allowed
    ]
    assert not wrong


def test_the_submitting_side_imports_no_torch() -> None:
    modules = [name for name in MODULES if room(name) in WITHOUT_TORCH] + list(WITHOUT_TORCH_TOO)
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "    assert 'matplotlib' not in sys.modules, name\n"
    )
    run_python(code)


def test_help_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys\n"
        "from launcher.cli import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'rich', 'matplotlib', 'numpy', 'wandb', 'deepspeed'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    assert "launcher COMMAND" in run_python(code)


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_are_short(module: str) -> None:
    path = MODULES[module]
    text = path.read_text(encoding="utf-8")
    assert path.stem not in ("utils", "util", "helpers", "misc", "common")
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert function_length(node) <= 50, f"{module}.{node.name}"


def function_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines
