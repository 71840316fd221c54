"""Finds out what a backend has: each capability is tried once, by a small call of known result.

findings, and then calls and features, are what is asked and what the answers mean; prober asks the
ranks; target_file writes down what was found.
"""
