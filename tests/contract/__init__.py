"""Tests of the public contract alone: behaviour that users may rely on, independent of the implementation."""
