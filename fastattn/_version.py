"""The version, in one place; pyproject.toml reads it without importing torch."""

__version__ = "0.3.0"
