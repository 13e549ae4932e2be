"""Environments written in torch: small ones to try things on."""

from gleanrl.envs.custom.pendulum import PendulumEnv
from gleanrl.envs.custom.tictactoe import TicTacToeEnv

__all__ = ["PendulumEnv", "TicTacToeEnv"]
