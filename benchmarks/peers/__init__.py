"""Sides of other libraries, one module each. `peer_worker.py` runs them in an interpreter that has the libraries.

Each module has VERSION and SETUPS (case name -> set-up). Their work is that of gleanrl's sides, with the same
environments, networks and rows. Where a peer is slow, a turn has less work. A peer that cannot store all 11 columns of
a row stores fewer, which is to its advantage.
"""
