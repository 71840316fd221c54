"""TCP transport: this project's authenticated protocol, and C++ Gloo's wire protocol.

secret                    the secret of a group, and who can know it
handshake                 who calls, and does it know the group's secret?
loop                      the event loop
mesh, connect_all         connections between all ranks
collective_run            one collective, step by step
collectives               which schedule a collective takes
socket_transfer           one message of the user
group                     what groups of both protocols share
tcp_group, tcp            the authenticated protocol
gloo_group, gloo_wire     Gloo's wire
communicator              the `Communicator` over such a group
"""
