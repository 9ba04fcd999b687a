"""The commands. Each imports what it needs when it is called, so that help is quick and needs no torch."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from launcher import __version__, output

HELP = """\
launcher COMMAND [hydra flags] [overrides]

State the effective batch once; the launcher works out the rest, starts the ranks, and every way of running them gives
the same update.

  train              compose, plan, start the ranks and follow the run to its end; with -m a sweep
                     (sweep=linear_scaling is a prepared one; sweep.resume=DIR goes on with one, and with
                     sweep.retry=failed runs what failed again)
  plan [--json]      everything up to the start and not a step further: prints the plan; with -m one row a run;
                     --draw shows when each rank of a pipeline works on what, and draws it to pipeline.png
  verify             a few updates of this model under every strategy here, against one process: a row for each
  resume RUN_DIR     goes on from the newest checkpoint [--from N]; overrides may change where and how it runs, and only
                     with --force what it computes
  status DIR         state, updates, rate and time left of one run or of every run below DIR
  report DIR         report.html, .md and .png of a sweep or a run, also while it runs: a table, curves, and the largest
                     batch that reaches the loss of the smallest
  export RUN_DIR     the trained model as one safetensors file [--output FILE]

Overrides are Hydra's: batch.global_batch_size=256 data=text data.train.path=book.txt
`launcher train --help` shows the groups and the configuration. In docs/configuration.md stands every key.

Exit codes: 0 finished, 2 refused before any rank started, 3 a rank failed, 4 the numbers failed, 5 verify found a
difference, 75 stopped early with a complete checkpoint, to go on with resume; others pass through from your code.
"""

COMMANDS = ("train", "plan", "verify", "resume", "status", "report", "export")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(f"launcher {__version__}")
        return 0
    command, rest = arguments[0], arguments[1:]
    from launcher.errors import LauncherError, nearest

    if command not in COMMANDS:
        hint = nearest(command, COMMANDS)
        print(f"launcher: there is no command '{command}'" + (f"; {hint}" if hint else ""), file=sys.stderr)
        print(f"  the commands are {', '.join(COMMANDS)}; see launcher --help", file=sys.stderr)
        return 2
    try:
        _check_surroundings(rest)
        return _dispatch(command, rest)
    except LauncherError as error:
        print(f"launcher {command}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print(f"launcher {command}: interrupted", file=sys.stderr)
        return 130


def _check_surroundings(rest: Sequence[str]) -> None:
    """That the current folder is there, and that every argument is text. Raises LauncherError."""
    from launcher.errors import LauncherError

    try:
        os.getcwd()
    except FileNotFoundError:
        raise LauncherError("the current folder has been deleted: go to one that is there") from None
    for one in rest:
        try:
            one.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(one).decode(errors="replace")
            raise LauncherError(f"{shown}: not UTF-8, at the character shown as \N{REPLACEMENT CHARACTER}") from None


def _dispatch(command: str, rest: list[str]) -> int:
    if command in ("train", "plan"):
        from launcher.commands import plan, train

        return train(rest) if command == "train" else plan(rest)
    if command == "verify":
        from launcher.verify import verify

        return verify(rest)
    if command == "resume":
        from launcher.resume import resume

        return resume(rest)
    from launcher.run_commands import export, report, status

    if command == "status":
        parser = argparse.ArgumentParser(
            prog="launcher status",
            description="State, updates, loss, rate and time left of a run, or of every run below DIR.",
            epilog="A run's folder stands below runs/, a sweep's below sweeps/: launcher status runs shows them all.",
        )
        parser.add_argument(
            "dir", metavar="DIR", help="the folder of a run, of a sweep, or one that holds such folders"
        )
        return status(parser.parse_args(rest).dir)
    if command == "report":
        parser = argparse.ArgumentParser(
            prog="launcher report",
            description="A table, curves and a verdict: the largest batch whose loss is that of the base batch, within "
            "the noise of the seeds. Written to report.html, report.md and report.png in DIR.",
            epilog="Everything is read from the files that the runs have left; docs/large_batches.md says how.",
        )
        parser.add_argument("dir", metavar="DIR", help="the folder of a sweep, as in sweeps/NAME/TIME, or of a run")
        return report(parser.parse_args(rest).dir)
    parser = argparse.ArgumentParser(
        prog="launcher export",
        description="The trained model as one safetensors file.",
        epilog="Its keys are those of the plain model: safetensors.torch.load_file reads it, +model_weights=FILE "
        "starts another run from it. Of a model of transformers (model=hf) --output names a folder that "
        "from_pretrained reads, unless it ends in .safetensors.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a run that has finished")
    parser.add_argument("--output", help="the file or folder to write; default: RUN_DIR/model.safetensors")
    parsed = parser.parse_args(rest)
    return export(parsed.run_dir, parsed.output)


def entry() -> None:
    """The program: SIGTERM and SIGUSR1 leave through the same clean-up as an error, and output that breaks stops
    nothing."""
    output.use_utf8()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda taken, _frame: sys.exit(128 + taken))
    stdout = output.guard()
    # a sweep or a run goes on without its display; of the others the output is all
    is_all = sys.argv[1:2] not in (["train"], ["resume"])
    try:
        code = main()
    except SystemExit as stop:  # of a parser that has printed its help or a refusal
        if not isinstance(stop.code, int | None):
            raise
        code = stop.code or 0
    sys.exit(output.exit_code(code, stdout, is_all=is_all))
