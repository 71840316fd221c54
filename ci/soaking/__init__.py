"""`ci/soak`: random programs of collectives, in each of which one rank has a fault.

rounds.py     one round, drawn from a seed: a program, and a fault at one place of it
program.py    what a rank does in a round: the program, checked step by step, and the fault
host.py       a process that forks the ranks of a host, and watches how they end
link.py       a cable between two hosts of one machine
judging.py    what should become of the ranks of a round, and what did not
__main__.py   the command: draws, runs, judges, counts
"""
