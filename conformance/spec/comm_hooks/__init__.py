"""Cases of the profile comm_hooks."""
