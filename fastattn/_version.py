"""The one place where the version is written; read by pyproject.toml without importing torch."""

__version__ = "0.1.0"
