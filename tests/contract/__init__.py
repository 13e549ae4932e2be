"""Tests written from the public contract alone: what a user may rely on, whatever the code behind it."""
