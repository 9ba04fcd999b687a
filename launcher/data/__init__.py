"""What is trained on: map-style data sets."""

from launcher.data.python_stdlib import PythonStdlib
from launcher.data.text import ByteSamples, Text

__all__ = ["ByteSamples", "PythonStdlib", "Text"]
