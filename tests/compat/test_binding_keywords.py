"""Public constructors accept the keywords of other releases."""

from __future__ import annotations

import inspect
import math
import pickle
import traceback
from functools import partial

import pytest
import torch

from gleanrl.collectors import MultiSyncDataCollector, SyncDataCollector
from gleanrl.compat import binding
from gleanrl.compat.names import UnservedKeyword
from gleanrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gleanrl.envs import GymEnv, VecNorm
from gleanrl.errors import InvalidArgumentError, InvalidTypeError, UnservedKeywordError


class Oven:
    def __init__(self, temperature=0, *, minutes=1):
        self.setting = temperature, minutes


class OpenOven:
    def __init__(self, temperature=0, **more):
        self.setting = temperature, more


@pytest.fixture
def checked(monkeypatch):
    older = {"Oven": {"heat": "temperature"}, "OpenOven": {"heat": "temperature"}}
    monkeypatch.setattr(binding, "KEYWORDS", older)
    unserved = {"fan": UnservedKeyword("open the door"), "grill": UnservedKeyword("use the pan", off=False)}
    monkeypatch.setattr(binding, "UNSERVED_KEYWORDS", {"Oven": unserved})

    def make(cls):
        copy = type(cls.__name__, (cls,), {"__init__": cls.__init__, "__module__": "gleanrl.fakes"})
        binding.check_keywords(copy)
        return copy

    return make


def test_older_spellings_are_translated(checked):
    assert checked(Oven)(heat=3).setting == (3, 1)
    assert checked(OpenOven)(heat=3, steam=True).setting == (3, {"steam": True})


def test_both_spellings_at_once_raise(checked):
    with pytest.raises(InvalidArgumentError, match="heat is another word for temperature"):
        checked(Oven)(heat=3, temperature=3)


def test_unserved_keywords_name_a_replacement(checked):
    oven = checked(Oven)
    assert oven(3, fan=None, grill=False).setting == (3, 1)
    with pytest.raises(UnservedKeywordError, match="Oven: grill isn't served: use the pan"):
        oven(grill=True)


def test_class_without_a_constructor_uses_its_bases(checked):
    small = type("Small", (checked(Oven),), {"__module__": "gleanrl.fakes"})
    binding.check_keywords(small)
    assert small(heat=2).setting == (2, 1)
    with pytest.raises(TypeError, match="Small.__init__.*'minute'; did you mean"):
        small(minute=3)


def test_an_unknown_keyword_raises_with_the_nearest_known_one(checked):
    with pytest.raises(TypeError, match="unexpected keyword argument 'minute'; did you mean 'minutes'"):
        checked(Oven)(minute=3)
    with pytest.raises(TypeError, match="'xyz'; it takes minutes, temperature"):
        checked(Oven)(xyz=3)


@pytest.mark.parametrize(
    ("keyword", "written"),
    [
        ("total_timesteps", "total_frames=total_timesteps"),
        ("n_steps", r"frames_per_batch=n_steps \* num_envs"),
        ("n_envs", r"GymEnv\(name, num_envs=n_envs\)"),
        ("learning_starts", "init_random_frames=learning_starts"),
        ("buffer_size", r"ReplayBuffer\(storage=LazyTensorStorage\(buffer_size\)\)"),
        ("gradient_steps", r"a loop with one buffer\.sample\(\)"),
        ("train_freq", r"frames_per_batch=train_freq \* num_envs"),
    ],
)
@pytest.mark.parametrize("cls", [SyncDataCollector, MultiSyncDataCollector, ReplayBuffer])
def test_keywords_of_stable_baselines3_name_those_of_gleanrl(cls, keyword, written):
    with pytest.raises(InvalidTypeError, match=f"unexpected keyword argument '{keyword}'; write {written}"):
        cls(**{keyword: 5})


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda: ReplayBuffer(1000), r"ReplayBuffer\(storage=LazyTensorStorage\(1000\), "),
        (lambda: ReplayBuffer(LazyTensorStorage(9)), r"ReplayBuffer\(storage=\.\.\., "),
        (lambda: TensorDictReplayBuffer(9), r"TensorDictReplayBuffer\(storage=LazyTensorStorage\(9\)"),
        (lambda: PrioritizedReplayBuffer(9, alpha=0.7), r"\(storage=LazyTensorStorage\(9\)"),
        (lambda: SyncDataCollector(None, None, 200), r"SyncDataCollector\(\.\.\., frames_per_batch=200, "),
    ],
)
def test_surplus_positional_arguments_are_written_by_keyword(call, written):
    with pytest.raises(InvalidTypeError, match=f"only taken by keyword.*write .*{written}"):
        call()


def test_surplus_positional_arguments_without_advice_raise_as_in_python(checked):
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments but 3 were given"):
        checked(Oven)(1, 2)


def test_public_classes_keep_signature_and_pickling():
    assert "batch_size" in inspect.signature(ReplayBuffer).parameters
    assert pickle.loads(pickle.dumps(ReplayBuffer(batch_size=3))).batch_size == 3
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        ReplayBuffer(batchsize=3)


def test_tracebacks_explain_the_wrapper_frame(checked):
    class Broken(Oven):
        def __init__(self, temperature=0):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as caught:
        checked(Broken)(3)
    frames = traceback.extract_tb(caught.tb)
    assert [frame.name for frame in frames[1:]] == ["checked", "__init__"]
    assert "# the constructor itself" in frames[1].line
    assert "checked" not in [entry.name for entry in caught.traceback.filter(caught)]


def test_files_of_storages_are_removed_and_shared_in_one_way():
    LazyMemmapStorage(3, auto_cleanup=None, shared_init=False)
    with pytest.raises(UnservedKeywordError, match="auto_cleanup isn't served: files without a scratch_dir"):
        LazyMemmapStorage(3, auto_cleanup=True)
    with pytest.raises(
        UnservedKeywordError, match="shared_init isn't served: make the buffer with shared=True"
    ):
        LazyTensorStorage(3, shared_init=True)


def test_gymnasium_environments_get_arrays():
    GymEnv("CartPole-v1", convert_actions_to_numpy=True).close()
    with pytest.raises(UnservedKeywordError, match="convert_actions_to_numpy"):
        GymEnv("CartPole-v1", convert_actions_to_numpy=False)


@pytest.mark.parametrize("make", [RandomSampler, partial(SliceSampler, num_slices=2)])
def test_samplers_with_replacement_name_the_ones_without(make):
    make(replacement=True)
    with pytest.raises(TypeError, match="replacement isn't served: SamplerWithoutReplacement"):
        make(replacement=False)


def test_class_inherits_the_table_rows_of_its_bases():
    assert TensorDictRoundRobinWriter(track_generations=True)
    with pytest.raises(
        UnservedKeywordError, match="TensorDictRoundRobinWriter: track_generations isn't served"
    ):
        TensorDictRoundRobinWriter(track_generations="some")
    with pytest.raises(UnservedKeywordError, match="PrioritizedReplayBuffer: use_ray_service isn't served"):
        PrioritizedReplayBuffer(alpha=0.7, beta=0.5, use_ray_service=True)


def test_no_op_values_are_accepted(checked, monkeypatch):
    unserved = {"fan": UnservedKeyword("no", off=(False, math.nan)), "steam": UnservedKeyword("no", off=0.5)}
    monkeypatch.setattr(binding, "UNSERVED_KEYWORDS", {"Oven": unserved})
    oven = checked(Oven)
    for value in (None, False, math.nan):
        assert oven(3, fan=value, steam=0.5).setting == (3, 1)
    for wrong in ({"fan": 0}, {"fan": torch.zeros(2)}, {"steam": torch.zeros(2)}, {"steam": 1}):
        with pytest.raises(UnservedKeywordError, match="isn't served: no"):
            oven(3, **wrong)


def test_the_older_statistics_name_the_newer_ones():
    VecNorm(["a"], stateful=True)
    with pytest.raises(UnservedKeywordError, match="stateful isn't served: VecNormV2 takes it"):
        VecNorm(["a"], new_api=True, stateful=False)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_device_where_priorities_are_kept_is_accepted(device):
    storage = LazyTensorStorage(10)
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=storage, sampler_device=device)
    assert buffer.stats().capacity == 10
