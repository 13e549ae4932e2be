"""Importing this takes a process over that a taken-over program has started, without a word."""

from gleanrl._takeover.import_hook import install

install(quiet=True)
