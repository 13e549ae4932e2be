"""Checkpoints: states in folders, complete or not there at all. This layer knows nothing of whose states they are.

- `values`: states as JSON and arrays, and back. Nothing that is read is ever executed.
- `manifest`: the file that says what belongs to a checkpoint; checked before anything is believed.
- `segments`: rows of columns, cut into what is written, linked and read by itself.
- `files`: which extents are written, and which are those of another checkpoint (`earlier`); `packs`: the data files
  that they get; `reading`: the same, read.
- `migrations`: what earlier formats become.
- `background`: commits by a thread.
- `folder`: the folder that a user names: commits, what is complete in it, leftovers.

A folder holds a file ``LOCK`` and checkpoints ``ckpt-<number>-<id>``, each under a name never used before: data files
``000000.bin`` and so on, and ``manifest.json``. A checkpoint is written in ``tmp-<id>``, every file synced, the
manifest last; then it gets its name by one rename, and the folder is synced. What has another name is no checkpoint.
"""
