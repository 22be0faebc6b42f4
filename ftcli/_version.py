"""The version of ftcli."""

__version__ = "0.1.0"
