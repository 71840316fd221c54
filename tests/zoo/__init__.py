"""Small backends as strangers would write them: each does right what it claims, and claims little.

The suite must not hold against them what they do not claim, and must find the one bug that each of
their twins has (`bugs.py`). A new user may also read them as examples of a backend in Python.
"""
