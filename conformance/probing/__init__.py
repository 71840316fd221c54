"""Probes a backend's capabilities: each is tried once, by a small call of known result.

findings, and then calls and features, are what is asked and what the answers mean;
wrapped_backends looks for backends of torch inside; prober asks the ranks; target_file writes down
what was found.
"""
