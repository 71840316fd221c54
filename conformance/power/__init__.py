"""Mutation testing of the suite: how many generated backends with one bug each it rejects.

handles.py      what a call returns: handles that relay another one, but for one thing
calls.py        one call of an operation, as a bug sees it: what it reads, what it writes
defects.py      what goes wrong, such as a last element that is missed
conditions.py   when it does, such as for an odd number of elements
mutants.py      all that make sense together, as targets of the suite
judging.py      runs the suite on a mutant until something is held against it
command.py      `python -m conformance power`
"""
