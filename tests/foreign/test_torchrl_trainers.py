"""TorchRL's trainers work with gleanrl's collectors, buffers and environments."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict.nn import TensorDictSequential

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrl")
    from torchrl import trainers
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.record import VideoRecorder
from torchrl.record.loggers import CSVLogger

from gleanrl.collectors import SyncDataCollector
from gleanrl.data import LazyTensorStorage, TensorDictReplayBuffer
from gleanrl.envs import Compose, ExplorationType, GymEnv, StepCounter, TransformedEnv
from gleanrl.envs import transforms as ours

pytestmark = pytest.mark.filterwarnings("default")

RECORDER = getattr(trainers, "LogValidationReward", None) or trainers.Recorder


class Pictures(ours.Transform):
    """Makes an image of the observation."""

    def _call(self, tensordict):
        image = tensordict.get("observation").abs().clamp_max(1).mul(255).to(torch.uint8)
        return tensordict.set("pixels", image.view(2, 2, 1).expand(2, 2, 3))

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


def make_env(*recorders):
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(20), *recorders))


def test_a_trainer_collects_learns_and_evaluates(tmp_path):
    env = make_env()
    actor = QValueActor(MLP(in_features=4, out_features=2, num_cells=[8]), spec=env.action_spec)
    explore = TensorDictSequential(actor, EGreedyModule(env.action_spec, annealing_num_steps=200))
    collector = SyncDataCollector(env, explore, frames_per_batch=50, total_frames=200)
    loss = DQNLoss(actor, delay_value=True, action_space=env.action_spec)
    logger = CSVLogger("run", log_dir=str(tmp_path), video_format="pt")
    trainer = trainers.Trainer(
        collector=collector,
        total_frames=200,
        frame_skip=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters()),
        optim_steps_per_batch=3,
        logger=logger,
        log_interval=50,
        progress_bar=False,
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=16)
    trainers.ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    trainer.register_op("post_optim", SoftUpdate(loss, eps=0.9).step)
    trainers.UpdateWeights(collector, 1).register(trainer)
    with pytest.warns(UserWarning, match="pixels"):
        shown = make_env(Pictures(), VideoRecorder(logger, tag="seen", make_grid=False, skip=1))
        RECORDER(
            record_interval=2,
            record_frames=20,
            policy_exploration=explore,
            environment=shown,
            exploration_type=ExplorationType.DETERMINISTIC,
        ).register(trainer)
        trainer.train()
    assert trainer.collected_frames == len(buffer) == 200
    assert list(tmp_path.rglob("seen*.pt"))
    shown.rollout(5)
