"""Access to the operating system: files, time, processes, threads, shared memory, interrupts and fault points."""
