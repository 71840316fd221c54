"""Subcommands of the command line, one module each; `bench` and `power` have their own folders.

Each has `add_arguments(parser)` and `run(arguments) -> exit code`; `conformance/__main__.py` lists
them. Refuse bad input with `UsageError`: one line, exit code 2.
"""
