"""``python -m launcher COMMAND …``."""

import sys

from launcher.cli import main

sys.exit(main())
