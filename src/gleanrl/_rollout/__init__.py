"""Rollouts: the loop, and the two parts that it alternates, actors and steppers."""
