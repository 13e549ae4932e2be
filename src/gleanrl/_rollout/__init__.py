"""Rollouts: the loop, and the actors and steppers that it alternates."""
