"""The operating system: files, time, processes, shared memory and fault points."""
