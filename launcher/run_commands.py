"""The commands on a folder that is there: status, report, export."""

import os
import shutil
from pathlib import Path

from rich.console import Console

from launcher.errors import LauncherError
from launcher.export import write_folder
from launcher.observe.status import render_status
from launcher.prepare import short
from launcher.report.show import print_verdict
from launcher.report.write import HTML, write_report
from launcher.run_dir import RunDir


def status(folder: str) -> int:
    """Prints the state of the run in `folder`, or of every run below it."""
    render_status(Path(folder), Console())
    return 0


def report(folder: str) -> int:
    """Writes the report of the sweep or the run in `folder`, and prints its verdict and where it is."""
    made = write_report(Path(folder))
    print_verdict(made, short(made.source.folder / HTML), Console())
    return 0


def export(folder: str, output: str | None) -> int:
    """Writes the trained model of a run to `output`, whole or not at all, and prints where it is.

    One safetensors file; of a model of transformers a folder that `from_pretrained` reads, unless `output` ends in
    .safetensors. Without `output` nothing is written: the run has the file.

    Raises:
        LauncherError: no run there, no model yet, or the output can't be written.
    """
    run = RunDir.existing(folder)
    if not run.model.is_file():
        state = run.read_status()["state"]
        raise LauncherError(f"{folder}: no model there; it is written when a run finishes, and this one is {state}")
    target = run.model if output is None else Path(output)
    if output is not None and run.pretrained.is_dir() and target.suffix != run.model.suffix:
        try:
            write_folder(run, target)
        except OSError as error:
            raise LauncherError(f"{target}: can't be written: {error.strerror or error}") from error
    elif target.resolve() != run.model:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(run.model, temporary)
            os.replace(temporary, target)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise LauncherError(f"{target}: can't be written: {error.strerror}") from error
    print(target)
    return 0
