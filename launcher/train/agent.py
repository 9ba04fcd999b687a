"""The entry of one node: ``python -m launcher.train.agent RUN_DIR`` runs its ranks under torch's elastic agent."""

import argparse
import signal
import sys
from pathlib import Path

from launcher.train.process import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # before torch is imported, which takes seconds
    parser = argparse.ArgumentParser(prog="python -m launcher.train.agent", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args()

    from launcher.train.elastic import run_node

    sys.exit(run_node(arguments.run_dir))
