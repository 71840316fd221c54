"""How ranks find each other before they are connected.

store       publish something in the store, and wait for what the others publish
addresses   what a rank publishes: its addresses, in Gloo's binary form
interfaces  which network interface and host name a rank listens on
"""
