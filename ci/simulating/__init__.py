"""`ci/simulate`: drawn programs under drawn schedules of faults, in one process, until one fails.

schedule.py   one simulation, as data: a program, faults, weather and a seed
judging.py    runs it, and says what should not have happened
__main__.py   the command: draws, counts, and shrinks what fails
"""
