"""Small backends as outside authors might write them: right in what they claim, which is little.

The suite must not hold against them what they do not claim, and must find the one bug that each of
their twins has (`catalogue.py`). A new user may also read them as examples of a backend in Python.
"""
