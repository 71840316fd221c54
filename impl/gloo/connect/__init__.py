"""From a store to a connected group.

fresh_prefix  a part of the store that no earlier group has used
transports    which transport a group gets, found out by trying
"""
