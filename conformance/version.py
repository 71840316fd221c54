"""The version of the suite. It stands in certificates; pyproject.toml reads it here."""

VERSION = "0.1.0"
