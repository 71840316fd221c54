"""Mutation testing of the suite: how many targets with one bug each it rejects.

Backends that are generated:
handles.py            what a call returns: handles that relay another one, but for one thing
calls.py              one call of an operation, as a bug sees it: what it reads, what it writes
defects.py            what goes wrong, such as a last element that is missed
conditions.py         when it does, such as for an odd number of elements
generated_mutants.py  all that make sense together, as targets of the suite

Small changes of a target's source:
source_mutations.py   what a careless author might have written instead
source_loading.py     loads a changed module in a rank, or marks the lines that are run
source_mutants.py     the changes of a package, as targets of the suite

Of both:
reach.py              which cases can notice a bug: those that reach it
judging.py            runs the suite on a mutant until something is held against it
workers.py            processes that do so
command.py            `python -m conformance power`
"""
