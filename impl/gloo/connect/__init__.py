"""Connecting a group: its members, a fresh prefix of the store's keys, the choice of a transport.

membership    who they are when a group is reconfigured
fresh_prefix  a part of the store that no earlier group has used
transports    which transport a group gets, found out by trying
"""
