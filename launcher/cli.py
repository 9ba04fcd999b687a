"""The commands. Each imports what it needs when it is called, so that help is quick and needs no torch."""

import argparse
import signal
import sys
from collections.abc import Sequence

from launcher import __version__

HELP = """\
launcher COMMAND [hydra flags] [overrides]

State the effective batch once; the launcher works out the rest, starts the ranks, and every way of running them gives
the same update.

  train              compose, plan, start the ranks and follow the run to its end; with -m a sweep
  plan [--json]      everything up to the start and not a step further: prints the plan; with -m one row a run
  verify             a few updates of this model under every strategy here, against one process: a row for each
  status DIR         state, updates, rate and time left of one run or of every run below DIR
  export RUN_DIR     the trained model as one safetensors file [--output FILE]

Overrides are Hydra's: batch.global_batch_size=256 data=text data.train.path=book.txt
`launcher train --help` shows the groups and the configuration. In docs/configuration.md stands every key.

Exit codes: 0 finished, 2 refused before any rank started, 3 a rank failed, 4 the numbers failed, 5 verify found a
difference; others pass through from your code.
"""

COMMANDS = ("train", "plan", "verify", "status", "export")


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
        return _dispatch(command, rest)
    except LauncherError as error:
        print(f"launcher {command}: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print(f"launcher {command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left: nothing is wrong
        sys.stderr.close()
        return 0


def _dispatch(command: str, rest: list[str]) -> int:
    if command in ("train", "plan"):
        from launcher.commands import plan, train

        return train(rest) if command == "train" else plan(rest)
    if command == "verify":
        from launcher.verify import verify

        return verify(rest)
    from launcher.run_commands import export, status

    if command == "status":
        parser = argparse.ArgumentParser(
            prog="launcher status", description="State of a run or of every run below DIR."
        )
        parser.add_argument("dir", metavar="DIR")
        return status(parser.parse_args(rest).dir)
    parser = argparse.ArgumentParser(prog="launcher export", description="The trained model as one safetensors file.")
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--output", help="the file to write; default: RUN_DIR/model.safetensors")
    parsed = parser.parse_args(rest)
    return export(parsed.run_dir, parsed.output)


def entry() -> None:
    """The program: SIGTERM leaves through the same clean-up as an error."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    sys.exit(main())
