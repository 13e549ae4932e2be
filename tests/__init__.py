"""Tests; the tree mirrors `src/gleanrl`."""
