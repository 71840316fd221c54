"""Simulated device on CPU memory (streams, events, pinned memory) that reports unordered accesses.

[Note: Simulated device]
Code that runs on an accelerator says in which order things happen: by the stream that work is put
on, by events that streams and the host wait for, by what it tells the allocator. Forget one of them
and the results are wrong once in a thousand runs. Here the same code runs on CPU tensors:

    order         which access is ordered before which: vector clocks of host threads and streams
    schedule      kernels that were put on streams, executed in any order that the events permit
    memory        what lies where: allocations, on the device or the host, and their accesses
    kernels       every torch operation becomes a kernel on the current stream (a dispatch mode)
    simulated     the device: what a program calls, and what was found
    autograd      backward passes over several devices, with a thread for each
    future        a future with streams
    handles       the device as a `impl.device.DeviceHandle`
    watched_gloo  process groups of `impl.gloo` on it
    group         a process group on it, whose other ranks are imagined

Two things are independent of each other. The clocks find every pair of accesses that is not
ordered, in whichever order it happened to be executed. And the schedule executes in a drawn order,
on memory that holds NaN until it is written, so a missing wait shows in the results as well.

It is one device, or several of them: see [Note: Several devices] in `simulated`.
"""
