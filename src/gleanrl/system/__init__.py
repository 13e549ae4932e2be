"""Seams to the operating system: files, time, processes and fault points."""
