"""A run: its options, what is selected, in which order, and what a case's end means."""
