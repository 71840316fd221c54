"""Stores: keys and values that ranks share, to find each other and to agree."""
