"""Rendered frames become observations."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from gleanrl.data.specs import Bounded
from gleanrl.envs.libs.gym import GymEnv, GymWrapper, rendering
from gleanrl.errors import InvalidArgumentError, UnsupportedError
from tests.fakes import ORACLE_ID, NestedDictEnv, OracleEnv, Script

LONG = Script(lengths=(50,))


class ReusingFrames(OracleEnv):
    """Renders every frame into the same array, upside down."""

    frame = np.zeros((6, 8, 3), np.uint8)

    def render(self) -> np.ndarray:
        self.frame[-1, 0] = (self.stream, self.episode, self.step_index)
        return self.frame[::-1]


def test_the_frame_is_copied() -> None:
    env = GymWrapper(ReusingFrames(script=LONG, render_mode="rgb_array"), from_pixels=True)
    data = env.rollout(4)
    assert data["pixels"][:, 0, 0, 2].tolist() == [0, 1, 2, 3]
    root = env.reset()
    stepped = env.step(env.rand_action(root))
    assert stepped["pixels"][0, 0, 2] == 0 and stepped["next", "pixels"][0, 0, 2] == 1


def test_pixels_spec_is_bounded_and_replaces_the_observation() -> None:
    env = GymWrapper(OracleEnv(render_mode="rgb_array"), from_pixels=True)
    spec = env.observation_spec["pixels"]
    assert (
        isinstance(spec, Bounded)
        and spec.shape == (6, 8, 3)
        and list(env.observation_spec.keys()) == ["pixels"]
    )


def test_pixels_are_added_to_the_entries_of_a_dict() -> None:
    env = GymWrapper(NestedDictEnv(script=LONG, render_mode="rgb_array"), from_pixels=True, pixels_only=False)
    data = env.rollout(3)
    assert data["pixels"][:, 0, 0, 2].tolist() == data["robot", "pose"][:, 2].tolist() == [0, 1, 2]


def test_pending_seed_survives_the_first_render() -> None:
    inner = OracleEnv(render_mode="rgb_array")
    env = GymWrapper(inner, from_pixels=True)
    env.set_seed(4)
    env.reset()
    assert inner.resets[-1][0] == 4


@pytest.mark.parametrize("mode", [None, "human", "rgb_array_list"])
def test_missing_render_mode_is_refused(mode: Any) -> None:
    with pytest.raises(UnsupportedError, match="rgb_array"):
        GymWrapper(OracleEnv(render_mode=mode), from_pixels=True)


def test_render_result_other_than_a_frame_is_refused() -> None:
    class Lazy(OracleEnv):
        def render(self) -> Any:
            return None

    with pytest.raises(UnsupportedError, match="array"):
        GymWrapper(Lazy(render_mode="rgb_array"), from_pixels=True)


def test_observation_named_pixels_is_refused() -> None:
    class Named(OracleEnv):
        def __init__(self) -> None:
            super().__init__(render_mode="rgb_array")
            self.observation_space = spaces.Dict({"pixels": self.observation_space})

        def _emit(self) -> Any:
            return {"pixels": super()._emit()}

    with pytest.raises(InvalidArgumentError, match="pixels"):
        GymWrapper(Named(), from_pixels=True, pixels_only=False)


def test_gym_env_sets_the_render_mode() -> None:
    data = GymEnv(ORACLE_ID, script=LONG, from_pixels=True).rollout(2)
    assert data["next", "pixels"].shape == (2, 6, 8, 3)
    assert rendering({"a": 1}) == {"a": 1, "render_mode": "rgb_array"}
    with pytest.raises(InvalidArgumentError, match="human"):
        GymEnv(ORACLE_ID, from_pixels=True, render_mode="human")


class Frames(gymnasium.Env[Any, Any]):
    """Returns samples of its observation space."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


FRAME = spaces.Box(0, 255, (4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("space", "keys", "frames"),
    [
        (FRAME, {"pixels"}, True),
        (spaces.Box(0, 255, (4, 5, 3), np.float32), {"pixels"}, True),
        (spaces.Dict(pixels=FRAME, more=spaces.Discrete(2)), {"pixels", "more"}, True),
        (spaces.Dict(image=FRAME), {"image"}, False),
        (spaces.Box(0, 255, (4, 5, 1), np.uint8), {"observation"}, False),
        (spaces.Box(0, 255, (3, 4, 5), np.uint8), {"observation"}, False),
        (spaces.Box(0, 255, (5, 3), np.uint8), {"observation"}, False),
        (spaces.Box(0, 1, (4, 5, 3), np.float32), {"observation"}, False),
        (spaces.Box(1, 255, (4, 5, 3), np.uint8), {"observation"}, False),
    ],
)
def test_environment_that_observes_frames_is_not_rendered_again(
    space: spaces.Space[Any], keys: set[str], frames: bool
) -> None:
    env = GymWrapper(Frames(space))
    assert set(env.observation_spec.keys()) == keys and env.from_pixels is frames
    several = GymWrapper(gymnasium.vector.SyncVectorEnv([lambda: Frames(space)] * 2))
    assert set(several.observation_spec.keys()) == keys and several.from_pixels is frames
