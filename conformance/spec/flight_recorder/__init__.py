"""The flight recorder: what it holds of calls that have ended, hang or failed, and what torch's
analysis makes of it.

Ranks keep their processes from case to case, and a recorder its entries, so cases look at what was
recorded since their groups were made.
"""
