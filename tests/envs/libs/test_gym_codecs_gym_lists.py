"""Values without a single fixed shape are collected as list columns."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, MultiCategorical, MultiOneHot, NonTensor, ReplayBuffer
from gleanrl.envs import GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from gleanrl.envs.libs.gym_codecs import SequenceCodec
from gleanrl.envs.libs.gym_spaces import encode, leaves, make_tree
from gleanrl.envs.libs.gym_stepper import GymStepper
from gleanrl.errors import EnvironmentContractError, PolicyError, SpaceError

WORDS = ("go", "to", "the", "red", "door")


class Mission(gymnasium.Env[Any, Any]):
    """Encodes its trajectory and step as text and as an image, as grid worlds do."""

    action_space = spaces.Discrete(3)
    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        mission=spaces.Text(20),
        path=spaces.Sequence(spaces.Box(0, 99, (2,))),
    )

    def __init__(self, lengths: tuple[int, ...] = (2, 3, 1)) -> None:
        self.lengths, self.trajectory, self.count = lengths, -1, 0

    def _observed(self) -> dict[str, Any]:
        code = 10 * self.trajectory + self.count
        path = tuple(np.full(2, i, np.float32) for i in range(self.count))
        return {"image": np.full((2, 2), code, np.uint8), "mission": str(code), "path": path}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.trajectory, self.count = self.trajectory + 1, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        over = self.count >= self.lengths[self.trajectory % len(self.lengths)]
        return self._observed(), 1.0, over, False, {}


def check(row: Any) -> None:
    """Check that image, mission and path of a row belong together, and also in its next."""
    for part in (row, row["next"]):
        code = int(part["image"][0, 0])
        assert part["mission"] == str(code) and part["path"].shape == (code % 10, 2)
        assert part["path"][:, 0].tolist() == [*range(code % 10)]
    assert int(row["next", "image"][0, 0]) == int(row["image"][0, 0]) + 1


class TestRollouts:
    def test_lists_stay_with_their_rows_in_rollouts_and_collectors(self) -> None:
        env = GymWrapper(Mission())
        assert isinstance(env.make_stepper(), GymStepper), "everything else at full speed"
        for batch in SyncDataCollector(env, None, frames_per_batch=5, total_frames=20):
            assert isinstance(batch, LazyStackedTensorDict)
            for row in batch.unbind(0):
                check(row)
        env = GymWrapper(Mission())
        check(env.rand_step(env.reset()))

    @pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
    def test_lists_stay_with_their_rows_in_batches_and_buffers(self, kind: Any) -> None:
        makers = [lambda: GymWrapper(Mission()), lambda: GymWrapper(Mission((4, 1)))]
        buffer = ReplayBuffer(storage=LazyTensorStorage(20, ndim=2), batch_size=6)
        collector = SyncDataCollector(kind(2, makers), None, frames_per_batch=8, total_frames=32)
        for batch in collector:
            for row in (row for part in batch.unbind(0) for row in part.unbind(0)):
                check(row)
            buffer.extend(batch)
            for row in buffer.sample().unbind(0):
                check(row)

    def test_lists_stay_with_their_rows_behind_transforms(self) -> None:
        env = TransformedEnv(GymWrapper(Mission((5,))), StepCounter(max_steps=2))
        batch = env.rollout(6, break_when_any_done=False)
        for row in batch.unbind(0):
            check(row)
        assert batch["step_count"].squeeze(-1).tolist() == [0, 1, 0, 1, 0, 1]

    def test_rollout_continues_from_a_given_root(self) -> None:
        env = GymWrapper(Mission((9,)))
        root = env.step_mdp(env.rand_step(env.reset()))
        batch = env.rollout(3, auto_reset=False, tensordict=root)
        assert batch[0]["mission"] == root["mission"]
        for row in batch.unbind(0):
            check(row)

    def test_blackjack_observations_are_dense(self) -> None:
        for categorical, spec in ((True, MultiCategorical), (False, MultiOneHot)):
            env = GymEnv("Blackjack-v1", categorical_action_encoding=categorical)
            assert isinstance(env.observation_spec["observation"], spec)
            batch = env.rollout(20, break_when_any_done=False)
            assert batch["observation"].shape == (20, 3 if categorical else 45)
            assert env.observation_spec["observation"].is_in(batch["observation"])
        env = GymEnv("Blackjack-v1", categorical_action_encoding=True, num_envs=3)
        cards = env.rollout(5, break_when_any_done=False)
        assert cards["observation"].shape == (3, 5, 3) and (cards["observation"][..., 2] <= 1).all()


def values(space: Any, value: Any, categorical: bool = True) -> dict[Any, Any]:
    """Return the encoded value by key."""
    tree = make_tree(space, ("o",), categorical, lists=True)
    return {codec.key: found for codec, found in zip(leaves(tree), encode(tree, value), strict=True)}


class Phrases(spaces.Space[str]):
    """A space of strings of another package, as MiniGrid's."""

    def __init__(self) -> None:
        super().__init__(dtype=str)  # type: ignore[arg-type]


class TestSpaces:
    @pytest.mark.parametrize("space", [spaces.Text(5), Phrases()], ids=["gymnasium", "other"])
    def test_text_becomes_str_and_other_values_raise(self, space: spaces.Space[str]) -> None:
        assert (
            values(space, np.str_("door")) == {("o",): "door"}
            and type(values(space, np.str_("a"))["o",]) is str
        )
        (codec,) = leaves(make_tree(space, ("o",), True, lists=True))
        assert isinstance(codec.spec, NonTensor)
        with pytest.raises(EnvironmentContractError, match="'o' expected a str, got int 3"):
            codec.encode(3)

    @pytest.mark.parametrize("stack", [False, True])
    def test_sequences_become_tensors_of_their_length(self, stack: bool) -> None:
        space = spaces.Sequence(spaces.Box(0, 1, (2,), np.float32), stack=stack, seed=3)
        for _ in range(9):
            value = space.sample()
            found = values(space, value)["o",]
            assert found.dtype == torch.float32 and found.tolist() == [list(map(float, row)) for row in value]
        assert values(space, ())["o",].shape == (0, 2)
        (codec,) = leaves(make_tree(space, ("o",), True, lists=True))
        assert codec.spec.shape == (-1, 2) and codec.spec.is_in(torch.ones(5, 2))
        with pytest.raises(EnvironmentContractError, match="'o' expected a sequence"):
            codec.encode(0.5)
        with pytest.raises(EnvironmentContractError, match=r"expected shape \(2,\)"):
            codec.encode([np.zeros(3, np.float32)])

    def test_sequences_of_choices_and_of_other_spaces_are_encoded(self) -> None:
        space = spaces.Sequence(spaces.Discrete(4, start=1))
        assert values(space, (1, 4))["o",].tolist() == [0, 3]
        assert values(space, (1, 4), categorical=False)["o",].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
        assert values(spaces.Sequence(spaces.Text(3)), ("a", "b"))["o",] == ("a", "b")

    def test_graphs_become_nodes_edges_and_links(self) -> None:
        space = spaces.Graph(spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3))
        graph = spaces.GraphInstance(
            np.ones((4, 2), np.float32), np.array([0, 2]), np.array([[0, 1], [2, 3]])
        )
        found = values(space, graph)
        assert found["o", "nodes"].shape == (4, 2) and found["o", "edges"].tolist() == [0, 2]
        assert found["o", "edge_links"].tolist() == [[0, 1], [2, 3]]
        alone = values(space, spaces.GraphInstance(np.ones((1, 2), np.float32), None, None))
        assert alone["o", "edges"].shape == (0,) and alone["o", "edge_links"].shape == (0, 2)
        without = spaces.Graph(spaces.Discrete(3), None)
        assert values(without, without.sample())["o", "edges"].shape[1] == 0
        with pytest.raises(
            EnvironmentContractError, match=r"expected a dict with \['nodes', 'edges', 'edge_links'\]"
        ):
            values(space, 3)

    def test_tuples_of_different_elements_become_groups(self) -> None:
        space = spaces.Tuple([spaces.Box(0, 1, (2,), np.float32), spaces.Discrete(3), spaces.Text(4)])
        found = values(space, (np.zeros(2, np.float32), 2, "door"))
        assert found["o", "1"] == 2 and found["o", "2"] == "door" and found["o", "0"].shape == (2,)
        with pytest.raises(EnvironmentContractError, match=r"missing \['2'\]"):
            values(space, (np.zeros(2, np.float32), 2))

    def test_one_of_passes_its_sample_through(self) -> None:
        space = spaces.OneOf([spaces.Discrete(2), spaces.Text(3)])
        value = space.sample()
        assert values(space, value)["o",] is value

    @pytest.mark.parametrize("categorical", [False, True])
    def test_tuples_of_choices_are_actions(self, categorical: bool) -> None:
        space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Discrete(2)])
        (codec,) = leaves(make_tree(space, ("action",), categorical))
        for value in ((1, 0), (3, 1)):
            action = codec.decode(codec.encode(value))
            assert action == value and space.contains(tuple(map(np.int64, action)))
        batch = codec.batched(2).encode((np.array([1, 2]), np.array([0, 1])))
        assert batch.shape == (2, 2 if categorical else 5)
        with pytest.raises(EnvironmentContractError, match="a tuple of 2 values"):
            codec.encode((1,))

    @pytest.mark.parametrize(
        "space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.OneOf([spaces.Text(3)])]
    )
    def test_spaces_without_numbers_are_refused_as_actions(self, space: Any) -> None:
        with pytest.raises(SpaceError, match="'action'"):
            make_tree(space, ("action",), True)

    def test_vectors_are_refused_by_name(self) -> None:
        with pytest.raises(SpaceError, match="'mission'.*SerialEnv"):
            GymWrapper(gymnasium.vector.SyncVectorEnv([Mission] * 2))
        codec = SequenceCodec(("o",), leaves(make_tree(spaces.Discrete(2), ("o",), True))[0])
        with pytest.raises(PolicyError, match="'o': expected numbers"):
            codec.decode(np.zeros(2))


def test_environment_with_text_observations_only_is_collected() -> None:
    class Talk(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Text(9), spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.t = 0
            return WORDS[0], {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return WORDS[self.t], 0.0, self.t == 4, False, {}

    batch = GymWrapper(Talk()).rollout(8, break_when_any_done=False)
    assert isinstance(batch, TensorDict) and isinstance(batch.get("observation"), NonTensorStack)
    assert batch["observation"] == [*WORDS[:4]] * 2 and batch["next", "observation"] == [*WORDS[1:]] * 2
