"""`TicTacToeEnv`: tic-tac-toe, an example with action masks, alternating players and two rewards."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.data.specs import Binary, Categorical, Composite, Unbounded
from gleanrl.envs.base import EnvBase

_LINES = torch.tensor(
    [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]], device="cpu"
)


class TicTacToeEnv(EnvBase):
    """Two players alternately put a stone on one of nine squares; three stones in a line win.

    The TensorDicts hold the boards, and the environment steps one game per row. The entries are:

    - ``"board"``, int32 ``(3, 3)``: -1 for a free square, 1 for a stone of the player to move, 0 for one of the other
      player;
    - ``"turn"``: the player to move, 0 or 1;
    - ``"mask"``: the free squares;
    - ``("player0", "reward")`` and ``("player1", "reward")``: 1 for a win, otherwise 0.

    A win terminates the game. A full board without a win truncates it. Moves aren't checked: a stone on a taken square
    replaces the stone there. Random moves come from torch's global generator until `set_seed` is called.

    Args:
        single_player: whether player 1 is random and moves in the same step, after player 0. If so, ``"turn"`` is
            always 0.
        device: see `EnvBase`.

    Examples:
        >>> env = TicTacToeEnv()
        >>> env.rollout(9)["next", "done"].sum()
        tensor(1)
    """

    batch_locked = False

    def __init__(
        self, *, single_player: bool = False, device: torch.device | str | int | None = None
    ) -> None:
        super().__init__(device=device)
        self.single_player = single_player
        self.observation_spec = Composite(
            board=Unbounded((3, 3), dtype=torch.int32),
            turn=Categorical(2, (1,), dtype=torch.int32),
            mask=Binary(9, dtype=torch.bool),
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(9)
        self.reward_spec = Composite(
            {("player0", "reward"): Unbounded((1,)), ("player1", "reward"): Unbounded((1,))}
        )
        flag = Categorical(2, (1,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag, truncated=flag)
        self.generator: torch.Generator | None = None

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        size = self.batch_size if tensordict is None else tensordict.batch_size
        board = torch.full((*size, 3, 3), -1, dtype=torch.int32, device=self.device)
        turn = torch.zeros((*size, 1), dtype=torch.int32, device=self.device)
        return TensorDict({"board": board, "turn": turn, "mask": _free(board)}, size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        board, turn = tensordict["board"], tensordict["turn"]
        board, won, full = _move(board, tensordict["action"])
        mover = turn
        if self.single_player:
            # `multinomial` rejects weights of zero, as full boards have; `over` discards their move below.
            weights = (_free(board) + 1e-9).reshape(-1, 9)
            answer = torch.multinomial(weights, 1, generator=self.generator).reshape(turn.shape[:-1])
            answered, lost, filled = _move(board, answer)
            over = won | full
            board = torch.where(over.unsqueeze(-1), board, answered)
            mover = torch.where(~over & lost, 1 - turn, turn)
            won, full = won | (lost & ~over), full | (filled & ~over)
        else:
            turn = 1 - turn
        out = {
            "board": board,
            "turn": turn.clone(),
            "mask": _free(board),
            ("player0", "reward"): (won & (mover == 0)).float(),
            ("player1", "reward"): (won & (mover == 1)).float(),
            "done": won | full,
            "terminated": won,
            "truncated": full & ~won,
        }
        return TensorDict(out, tensordict.batch_size, device=tensordict.device)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random actions into `tensordict`, drawn from the actions that its ``"mask"`` allows, and return it.

        Without a mask, or if `tensordict` is None, all nine squares may be drawn.
        """
        mask = None if tensordict is None else tensordict.get("mask", None)
        if tensordict is None or mask is None:
            return super().rand_action(tensordict)
        drawn = torch.multinomial(mask.reshape(-1, 9).float(), 1, generator=self.generator)
        return tensordict.set("action", drawn.reshape(tensordict.batch_size))

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.generator = torch.Generator(self.device or "cpu").manual_seed(seed)


def _free(board: torch.Tensor) -> torch.Tensor:
    """Return the free squares, ``(*batch, 9)`` bool."""
    return board.flatten(-2) == -1


def _move(board: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the board after a move as the next player sees it, whether the move won, and whether the board is full."""
    swapped = torch.where(board == -1, board, 1 - board).flatten(-2)
    # After the swap, 0 marks the stones of the player who moved.
    squares = swapped.scatter(-1, action.unsqueeze(-1), 0)
    won = (squares[..., _LINES.to(board.device)] == 0).all(-1).any(-1, keepdim=True)
    full = (squares != -1).all(-1, keepdim=True)
    return squares.unflatten(-1, (3, 3)), won, full
