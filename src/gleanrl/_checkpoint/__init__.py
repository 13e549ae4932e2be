"""Checkpoints: states in folders.

A checkpoint is complete, or it doesn't exist. This layer doesn't know the states' owners.

- `tree_codec`: states as JSON and arrays, and back. Reading never executes code.
- `manifest`: the file that lists the parts of a checkpoint, checked before use, and the migrations of earlier formats.
- `row_segments`: rows of columns, cut into segments.
- `writer`: the data files to write, and the links to an earlier checkpoint. `reader`: the reading of data files.
- `async_dump`: commits by a background thread.
- `folder`: the folder that a user names: commits, loads, and removal of leftovers.
- `hdf5`: states as HDF5 files.

A folder contains a file ``LOCK`` and checkpoints ``ckpt-<number>-<id>``. A checkpoint contains data files
(``000000.bin`` and so on) and ``manifest.json``. All other names are ignored.

A commit writes into ``tmp-<id>`` and syncs every file, with the manifest last. Then it renames the folder once, and
syncs the parent folder. Each checkpoint gets a name that was never used before. A swap under one name would take two
renames, and a crash between them would lose the checkpoint.
"""
