"""Importing this takes a process over that a taken-over program has started, without a word."""

from gleanrl.substitute.importing import install

install(quiet=True)
