"""Entries of info are read into the records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from gleanrl.data.specs import Composite, Unbounded
from gleanrl.envs import check_env_specs
from gleanrl.envs.libs.gym import GymWrapper
from gleanrl.envs.libs.gym_info import BaseInfoDictReader, default_info_dict_reader
from gleanrl.envs.libs.gym_stepper import GymStepper
from gleanrl.errors import EnvironmentContractError, InvalidArgumentError, InvalidTypeError
from tests.fakes import InfoEnv, OracleEnv, Script

LONG = Script(lengths=(50,))


class EveryKind(OracleEnv):
    """Info of every kind; some entries come only at the end of an episode or only at a reset."""

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "float": 0.5 + self.step_index,
            "double": np.float64(0.1) * self.step_index,
            "flag": self.step_index > 1,
            "list": [self.step_index, 2],
            "nested": {"deep": {"byte": np.uint8(self.step_index)}},
            "name": "text",
            "thing": object(),
        }
        if self.step_index == 0:
            info["level"] = 3
        if any(self.script.flags(self.stream, self.episode, self.step_index)):
            info["return"] = np.float32(7)
        return info


class TestLearning:
    def test_shapes_and_dtypes_come_from_a_reset_and_a_step(self) -> None:
        env = GymWrapper(EveryKind(script=LONG))
        with pytest.warns(UserWarning, match=r"\['name', 'thing'\]"):
            env.auto_register_info_dict()
        spec = env.observation_spec
        expected = {
            "float": ((), torch.float32),
            "double": ((), torch.float64),
            "flag": ((), torch.bool),
            "list": ((2,), torch.int64),
            ("nested", "deep", "byte"): ((), torch.uint8),
            "level": ((), torch.int64),
        }
        for key, (shape, dtype) in expected.items():
            assert (tuple(spec[key].shape), spec[key].dtype) == (shape, dtype), key
        assert set(spec.keys()) == {"observation", "float", "double", "flag", "list", "nested", "level"}

    def test_learning_keys_consumes_no_seed(self) -> None:
        inner = InfoEnv(script=LONG)
        env = GymWrapper(inner)
        env.set_seed(9)
        env.auto_register_info_dict()
        env.reset()
        assert [seed for seed, _ in inner.resets] == [None, 9]

    def test_unknown_keys_raise(self) -> None:
        with pytest.raises(EnvironmentContractError, match="(?s)'speed'.*velocity"):
            GymWrapper(InfoEnv(script=LONG)).set_info_dict_reader(default_info_dict_reader(["speed"]))

    def test_non_numeric_keys_raise(self) -> None:
        with pytest.raises(EnvironmentContractError, match="name"):
            GymWrapper(EveryKind(script=LONG)).set_info_dict_reader(default_info_dict_reader(["name"]))

    def test_given_spec_needs_no_trial(self) -> None:
        inner = EveryKind(script=Script(lengths=(2,), ending="truncated"))
        reader = default_info_dict_reader(spec={"return": Unbounded((), dtype=torch.float32)})
        env = GymWrapper(inner).set_info_dict_reader(reader)
        assert inner.resets == []
        data = env.rollout(4, break_when_any_done=False)
        assert data["next", "return"].tolist() == [0, 7, 0, 7] and data["return"].tolist() == [0, 0, 0, 0]


class TestReading:
    @pytest.mark.parametrize("path", ["stepper", "TensorDict"])
    def test_values_are_read_by_every_path(self, path: str) -> None:
        env = GymWrapper(EveryKind(script=LONG))
        env.set_info_dict_reader(default_info_dict_reader(["float", ("nested", "deep", "byte"), "level"]))
        if path == "stepper":
            assert isinstance(env.make_stepper(), GymStepper)
            data = env.rollout(3)
        else:
            root, rows = env.reset(), []
            for _ in range(3):
                stepped, root = env.step_and_maybe_reset(env.rand_action(root))
                rows.append(stepped.clone())
            data = torch.stack(rows)
        assert data["float"].tolist() == [0.5, 1.5, 2.5] and data["next", "float"].tolist() == [1.5, 2.5, 3.5]
        assert data["next", "nested", "deep", "byte"].tolist() == [1, 2, 3]
        assert data["level"].tolist() == [3, 0, 0] and data["next", "level"].tolist() == [0, 0, 0]

    def test_several_readers_add_their_keys(self) -> None:
        env = GymWrapper(InfoEnv(script=LONG))
        for key in ("velocity", "count"):
            env.set_info_dict_reader(default_info_dict_reader([key]))
        data = env.rollout(3)
        assert data["next", "count"].tolist() == [1, 2, 3] and data["next", "velocity"].shape == (3, 2)

    def test_private_names_are_skipped_unless_requested(self) -> None:
        shown = GymWrapper(InfoEnv(script=LONG)).set_info_dict_reader(default_info_dict_reader())
        assert "_secret" not in shown.observation_spec.keys()
        assert "_secret" in GymWrapper(InfoEnv()).auto_register_info_dict(False).observation_spec.keys()

    def test_a_change_of_shape_raises(self) -> None:
        class Growing(InfoEnv):
            def _info(self) -> dict[str, Any]:
                return {"list": np.zeros(1 + self.step_index // 2)}

        env = GymWrapper(Growing(script=LONG)).auto_register_info_dict()
        with pytest.raises(EnvironmentContractError, match="list"):
            env.rollout(3)

    def test_custom_reader_uses_the_tensordict_path(self) -> None:
        class Reader(BaseInfoDictReader):
            info_spec = Composite(twice=Unbounded((1,), dtype=torch.int64))

            def __call__(self, info: dict[str, Any], tensordict: Any) -> Any:
                return tensordict.set("twice", torch.tensor([2 * info["count"]]))

        env = GymWrapper(InfoEnv(script=LONG)).set_info_dict_reader(info_dict_reader=Reader())
        assert not isinstance(env.make_stepper(), GymStepper)
        data = env.rollout(3)
        assert data["twice"].tolist() == [[0], [2], [4]] and data["next", "twice"].tolist() == [[2], [4], [6]]

    @pytest.mark.parametrize("returns", [True, False])
    def test_function_reader_may_write_any_entry(self, returns: bool) -> None:
        def read(info: dict[str, Any], tensordict: Any) -> Any:
            tensordict.set("twice", torch.tensor([2 * info["count"]]))
            tensordict.set(("group", "half"), torch.tensor(info["count"] / 2))
            return tensordict if returns else None

        env = GymWrapper(InfoEnv(script=LONG)).set_info_dict_reader(read)
        assert env.observation_spec["twice"] == Unbounded((1,), dtype=torch.int64)
        check_env_specs(env)
        data = env.rollout(3)
        assert data["twice"].tolist() == [[0], [2], [4]] and data["next", "twice"].tolist() == [[2], [4], [6]]
        assert data["next", "group", "half"].tolist() == [0.5, 1.0, 1.5]

    def test_reader_called_directly_learns_its_spec(self) -> None:
        reader = default_info_dict_reader()
        out = reader({"a": 1, "b": {"c": np.float32([1, 2])}}, TensorDict({}, []))
        assert (
            out["a"] == 1 and out["b", "c"].tolist() == [1, 2] and reader.info_spec["a"].dtype == torch.int64
        )


class TestMistakes:
    @pytest.mark.parametrize("key", ["observation", "reward", "done", "action", "next", "collector"])
    def test_key_of_another_entry_is_refused(self, key: str) -> None:
        reader = default_info_dict_reader(spec={key: Unbounded(())})
        with pytest.raises(InvalidArgumentError, match=key):
            GymWrapper(InfoEnv()).set_info_dict_reader(reader)

    def test_second_reader_of_the_same_keys_is_refused(self) -> None:
        env = GymWrapper(InfoEnv()).auto_register_info_dict()
        with pytest.raises(InvalidArgumentError, match="count|velocity"):
            env.auto_register_info_dict()

    @pytest.mark.parametrize("reader", ["count", ["count"], lambda info, td: td])
    def test_value_without_info_spec_is_refused_as_reader(self, reader: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="info_spec"):
            GymWrapper(InfoEnv()).set_info_dict_reader(reader)

    def test_invalid_keys_and_specs_are_refused(self) -> None:
        with pytest.raises(InvalidTypeError, match="keys"):
            default_info_dict_reader("count")
        with pytest.raises(InvalidArgumentError, match="2 specs"):
            default_info_dict_reader(["a"], [Unbounded(()), Unbounded(())])
        with pytest.raises(InvalidArgumentError, match="'b'"):
            default_info_dict_reader(["a", "b"], {"a": Unbounded(())})
        with pytest.raises(InvalidArgumentError, match="aren't known"):
            _ = default_info_dict_reader(["a"]).codecs

    def test_keys_select_from_a_spec(self) -> None:
        spec = Composite(a=Unbounded(()), b=Composite(c=Unbounded((2,))))
        assert list(default_info_dict_reader([("b", "c")], spec).info_spec.keys(True, True)) == [("b", "c")]
        parallel = default_info_dict_reader(["x", "y"], [Unbounded(()), Unbounded((2,))])
        assert parallel.info_spec["y"].shape == (2,)


class GroupAtEnd(OracleEnv):
    """Puts a group into the info of the last step, as gymnasium's RecordEpisodeStatistics does."""

    def _info(self) -> dict[str, Any]:
        if any(self.script.flags(self.stream, self.episode, self.step_index)):
            return {"episode": {"r": 2.5, "l": self.step_index, "deep": {"x": 1.5}}}
        return {"always": {"r": 0.5, "l": self.step_index, "deep": {"x": 0.25}}}


GROUP = {"r": Unbounded(()), "l": Unbounded((), dtype=torch.int64), "deep": Composite(x=Unbounded(()))}


@pytest.mark.parametrize(
    "reader",
    [
        lambda: default_info_dict_reader(["episode"], spec={"episode": Composite(GROUP)}),
        lambda: default_info_dict_reader(["episode"], spec={"episode": GROUP}),
        lambda: default_info_dict_reader(["episode"], spec=[Composite(GROUP)]),
        lambda: default_info_dict_reader(
            ["episode"], spec=Composite(episode=Composite(GROUP), other=Unbounded(()))
        ),
        lambda: default_info_dict_reader(spec={"episode": Composite(GROUP)}),
    ],
)
def test_group_of_info_is_read_by_the_spec_of_the_group(reader: Any) -> None:
    env = GymWrapper(GroupAtEnd(script=Script(lengths=(3,))))
    env.set_info_dict_reader(reader())
    batch = env.rollout(4, break_when_any_done=False)
    assert batch["next", "episode", "r"].tolist() == [0.0, 0.0, 2.5, 0.0]
    assert batch["next", "episode", "l"].tolist() == [0, 0, 3, 0]
    assert batch["next", "episode", "deep", "x"].tolist() == [0.0, 0.0, 1.5, 0.0]
    check_env_specs(env)


def test_group_of_info_is_found_by_its_name() -> None:
    env = GymWrapper(GroupAtEnd(script=Script(lengths=(3,))))
    env.set_info_dict_reader(default_info_dict_reader(["always"]))
    batch = env.rollout(2)
    assert batch["next", "always", "l"].tolist() == [1, 2]
    assert batch["next", "always", "deep", "x"].tolist() == [0.25, 0.25]


def test_keys_without_a_spec_are_named_with_the_given_specs() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no spec for the keys \['other'\]; got .*'episode', 'r'"):
        default_info_dict_reader(["episode", "other"], spec={"episode": GROUP})
    with pytest.raises(InvalidTypeError, match="expected a spec for 'r', got float"):
        default_info_dict_reader(spec={"episode": {"r": 1.0}})
