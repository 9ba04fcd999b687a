"""The package as a user installs it: built, put into an environment of its own, and used away from the checkout."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]
RUN = ("batch.global_batch_size=4", "training.duration=2 updates", "cluster.device=cpu", "hydra.run.dir=run")


def call(*argv: str | Path, cwd: Path) -> str:
    """What a command prints; it must end with 0. Nothing of this test's environment leads to the checkout."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(one) for one in argv]
    done = subprocess.run(
        command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def without_the_checkout(folder: Path) -> Path:
    """A folder with all that is installed here but the launcher itself, and none of the files that lead elsewhere."""
    folder.mkdir()
    for packages in map(Path, site.getsitepackages()):
        for one in packages.iterdir():
            if one.suffix != ".pth" and not one.name.startswith(("launcher", "__pycache__")):
                (folder / one.name).symlink_to(one)
    return folder


def test_a_wheel_plans_and_trains_away_from_the_checkout(tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, CHECKOUT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    same = [(name, name) for name in ("hydra_plugins", "launcher")]
    for folder, inside in (("conf", "launcher/conf"), ("slurm", "launcher/slurm"), *same):
        files = [one for kind in ("*.py", "*.yaml", "*.sh") for one in (CHECKOUT / folder).rglob(kind)]
        assert files
        assert {f"{inside}/{one.relative_to(CHECKOUT / folder)}" for one in files} <= names
    assert [name for name in names if name.startswith(("tests", "examples", "benchmarks"))] == []

    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python, launcher = (tmp_path / "venv" / "bin" / name for name in ("python", "launcher"))
    call(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    others = without_the_checkout(tmp_path / "others")
    own = Path(call(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip())
    (own / "others.pth").write_text(f"{others}\n")

    empty = tmp_path / "empty"
    empty.mkdir()
    where = "import launcher, hydra_plugins.launcher_submit as plugin; print(launcher.__file__, plugin.__file__)"
    assert all(Path(one).is_relative_to(own) for one in call(python, "-c", where, cwd=empty).split())
    assert "updates" in call(launcher, "plan", *RUN, cwd=empty)
    assert list(empty.iterdir()) == []
    assert "finished" in call(launcher, "train", *RUN, cwd=empty)
    assert (empty / "run" / "model.safetensors").is_file()
    swept = call(launcher, "plan", "-m", "optimizer.lr=0.1,0.2", *RUN[:-1], cwd=empty)
    assert "Sweep of 2 runs" in swept
