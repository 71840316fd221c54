"""`ci/fuzz`: everything that reads bytes of others gets bytes that a coverage-guided fuzzer makes.

readers.py    what reads, the errors it may raise, and inputs to begin with
__main__.py   the command: runs the fuzzer on each, counts, keeps what fails
"""
