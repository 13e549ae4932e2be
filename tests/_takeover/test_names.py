"""The table of TorchRL names that a takeover serves is consistent; these tests need no TorchRL."""

from gleanrl import data
from gleanrl._takeover import names
from gleanrl.data.replay_buffers import samplers


def test_only_the_data_layer_is_served():
    assert names.is_data_layer("torchrl.data") and names.is_data_layer("torchrl.data.replay_buffers.samplers")
    for other in ("torchrl", "torchrl.modules", "torchrl.database", "torch.data", "mine.torchrl.data"):
        assert not names.is_data_layer(other)


def test_public_names_are_served_by_path():
    assert names.served("torchrl.data")["ReplayBuffer"] is data.ReplayBuffer
    assert names.served("torchrl.data.replay_buffers.samplers")["SliceSampler"] is samplers.SliceSampler


def test_parameter_schedulers_are_served():
    theirs = names.served("torchrl.data.replay_buffers.scheduler")
    assert {"LambdaScheduler", "LinearScheduler", "SchedulerList", "StepScheduler"} < theirs.keys()


def test_names_of_other_releases_are_served():
    assert names.served("torchrl.data")["BoundedTensorSpec"] is data.Bounded
    assert names.served("torchrl.data.tensor_specs")["CompositeSpec"] is data.Composite
    assert "_apply_to_composite" in names.served("torchrl.envs.transforms.transforms")


def test_path_without_a_counterpart_serves_no_names():
    assert names.served("torchrl.envs.libs.vmas") == {} == names.served("torchrl.data.no.such.path")


def test_names_that_are_not_served_are_left_to_torchrl():
    assert "PettingZooEnv" not in names.served("torchrl.envs")
    assert "make TorchRL's own" in names.explanation("torchrl.envs", "PettingZooEnv")
    assert names.explanation("torchrl.data", "Nothing") is None
