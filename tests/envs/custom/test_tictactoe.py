"""Tic-tac-toe follows its rules: turns, wins, draws and legal moves."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gleanrl.envs import TicTacToeEnv, check_env_specs


def play(env, *squares):
    root = env.reset()
    for square in squares:
        after = env.step(root.set("action", torch.tensor(square)))["next"]
        root = env.step_mdp(root)
    return after


def test_three_in_a_row_win_and_terminate():
    after = play(TicTacToeEnv(), 0, 3, 1, 4, 2)
    assert after["board"].tolist() == [[0, 0, 0], [1, 1, -1], [-1, -1, -1]]
    assert (float(after["player0", "reward"]), float(after["player1", "reward"])) == (1, 0)
    assert after["terminated"] and after["done"] and not after["truncated"]
    assert after["mask"].tolist() == [False] * 5 + [True] * 4
    lost = play(TicTacToeEnv(), 0, 2, 1, 4, 8, 6)
    assert lost["done"] and float(lost["player1", "reward"]) == 1


def test_full_board_without_a_line_is_a_draw():
    after = play(TicTacToeEnv(), 0, 1, 2, 4, 3, 5, 7, 6, 8)
    assert after["truncated"] and after["done"] and not after["terminated"]
    assert not after["player0", "reward"] and not after["player1", "reward"] and not after["mask"].any()


@pytest.mark.parametrize("alone", [False, True])
def test_rollouts_play_games_to_their_ends(alone):
    env = TicTacToeEnv(single_player=alone)
    check_env_specs(env, seed=0)
    torch.manual_seed(0)
    batch = env.rollout(60, break_when_any_done=False)
    taken = batch["mask"].gather(-1, batch["action"].unsqueeze(-1))
    assert taken.all(), "no stone on another"
    assert batch["next", "done"].sum() >= 6
    if alone:
        assert (batch["turn"] == 0).all()
        stones = (batch["next", "board"] != -1).flatten(1).sum(-1)
        assert (stones[~batch["next", "done"].squeeze(-1)] % 2 == 0).all()


def test_unlocked_board_steps_a_batch_of_games():
    env = TicTacToeEnv()
    env.set_seed(1)
    batch = env.rollout(5, break_when_any_done=False, tensordict=TensorDict({}, [7]))
    assert batch.shape == (7, 5) and env.rand_action()["action"].shape == ()
    assert batch["mask"].gather(-1, batch["action"].unsqueeze(-1)).all()
