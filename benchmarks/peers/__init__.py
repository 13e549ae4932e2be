"""The peers' sides, one module each, run by `peer_worker.py` in an interpreter that has them installed.

Each module has VERSION and SETUPS (case name -> set-up). The work is that of our sides in `collection.py`,
`replay.py`, `prioritized.py` and `slices.py`: the same environments, networks and rows, but less of it a turn where a
peer is slow. A peer that has no place for all 11 columns of a row stores fewer, which is to its advantage.
"""
