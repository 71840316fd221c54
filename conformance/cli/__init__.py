"""The command line, one module a subcommand.

Each has `add_arguments(parser)` and `run(arguments) -> exit code`; `conformance/__main__.py` lists
them. Refuse bad input with `UsageError`: one line, exit code 2.
"""
