"""Probes a backend's capabilities: each is tried once, by a small call of known result.

findings, and then calls and features, are what is asked and what the answers mean; beneath asks for
backends of torch within; prober asks the ranks; target_file writes down what was found.
"""
