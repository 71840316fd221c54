"""Registers commux's backend, "ucx", in every rank."""

import commux

commux.register()
