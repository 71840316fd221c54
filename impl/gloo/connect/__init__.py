"""Connecting a group: a fresh prefix of the store's keys, and the choice of a transport.

fresh_prefix  a part of the store that no earlier group has used
transports    which transport a group gets, found out by trying
"""
