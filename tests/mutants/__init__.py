"""Deliberately broken targets, at the path of the rule that each of them breaks: see kit.py."""
