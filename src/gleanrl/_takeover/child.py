"""Importing this module takes over a process that a taken-over program has started, and prints no messages."""

from gleanrl._takeover.import_hook import install

install(silent=True)
