"""Small example environments written in torch."""

from gleanrl.envs.custom.pendulum import PendulumEnv
from gleanrl.envs.custom.tictactoe import TicTacToeEnv

__all__ = ["PendulumEnv", "TicTacToeEnv"]
