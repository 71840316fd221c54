"""Rendezvous of the ranks of a group: the store, published addresses, network interfaces.

store       publish something in the store, and wait for what the others publish
addresses   what a rank publishes: its addresses, in Gloo's binary form
interfaces  which network interface and host name a rank listens on
"""
