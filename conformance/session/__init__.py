"""Pytest hooks of the plugin: collecting and running cases, progress, failures, the certificate."""
