"""Message protocols without I/O: frames, matching, eager and credit-based. Simulations run them.

frames        what travels on a connection
streams       bytes to frames and back
matching      which send meets which receive
eager         the authenticated protocol: small messages go at once
credits       Gloo's protocol: a message goes when its receiver has asked for it
own_messages  messages from a rank to itself
hub           one rank's connections on one device, and their messages
"""
