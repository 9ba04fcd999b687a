"""``python -m launcher COMMAND …``."""

from launcher.cli import entry

entry()
