"""The table of TorchRL names that a takeover serves is consistent; these tests need no TorchRL."""

from gleanrl import data
from gleanrl._takeover import names
from gleanrl.data.replay_buffers import samplers


def test_the_data_layer_and_nothing_else():
    assert names.is_data_layer("torchrl.data") and names.is_data_layer("torchrl.data.replay_buffers.samplers")
    for other in ("torchrl", "torchrl.modules", "torchrl.database", "torch.data", "mine.torchrl.data"):
        assert not names.is_data_layer(other)


def test_public_names_by_their_paths():
    assert names.served("torchrl.data")["ReplayBuffer"] is data.ReplayBuffer
    assert names.served("torchrl.data.replay_buffers.samplers")["SliceSampler"] is samplers.SliceSampler


def test_schedules_of_parameters():
    theirs = names.served("torchrl.data.replay_buffers.scheduler")
    assert {"LambdaScheduler", "LinearScheduler", "SchedulerList", "StepScheduler"} < theirs.keys()


def test_names_of_other_releases():
    assert names.served("torchrl.data")["BoundedTensorSpec"] is data.Bounded
    assert names.served("torchrl.data.tensor_specs")["CompositeSpec"] is data.Composite
    assert "_apply_to_composite" in names.served("torchrl.envs.transforms.transforms")


def test_a_path_without_a_counterpart_has_none():
    assert names.served("torchrl.envs.libs.vmas") == {} == names.served("torchrl.data.no.such.path")


def test_names_that_are_not_served_are_left_to_torchrl():
    assert "PettingZooEnv" not in names.served("torchrl.envs")
    assert "make TorchRL's own" in names.explanation("torchrl.envs", "PettingZooEnv")
    assert names.explanation("torchrl.data", "Nothing") is None
