"""Launcher: state the effective batch once; train it anywhere, with the same update everywhere."""

__version__ = "0.1.0"
