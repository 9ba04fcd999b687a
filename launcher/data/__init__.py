"""What is trained on: map-style data sets."""

from launcher.data.digits import Digits
from launcher.data.image_folder import ImageFolder
from launcher.data.python_stdlib import PythonStdlib
from launcher.data.text import ByteSamples, Text
from launcher.data.tokens import Tokens

__all__ = ["ByteSamples", "Digits", "ImageFolder", "PythonStdlib", "Text", "Tokens"]
