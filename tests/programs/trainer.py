"""DQN by TorchRL's `Trainer`, whose hooks fill the buffer, update the targets, log and evaluate."""

import tempfile
from pathlib import Path

import torch
from tensordict.nn import TensorDictSequential
from torchrl import trainers
from torchrl.collectors import MultiSyncCollector
from torchrl.data import LazyTensorStorage, MultiStep, TensorDictReplayBuffer
from torchrl.envs import Compose, ExplorationType, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.record.loggers.csv import CSVLogger

FRAMES, BATCH = 12_000, 200
LogReward = getattr(trainers, "LogScalar", None) or trainers.LogReward
Recorder = getattr(trainers, "LogValidationReward", None) or trainers.Recorder


def make_env():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter(200)))


def main():
    torch.manual_seed(0)
    env = make_env()
    net = MLP(in_features=4, out_features=2, num_cells=[64, 64])
    actor = QValueActor(net, in_keys=["observation"], spec=env.action_spec)
    greedy = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.05, annealing_num_steps=6_000)
    explore = TensorDictSequential(actor, greedy)
    collector = MultiSyncCollector(
        [make_env, make_env],
        explore,
        frames_per_batch=BATCH,
        total_frames=FRAMES,
        exploration_type=ExplorationType.RANDOM,
        postproc=MultiStep(gamma=0.98, n_steps=3),
        cat_results="stack",
        device="cpu",
        storing_device="cpu",
    )
    loss = DQNLoss(actor, delay_value=True, action_space=env.action_spec)
    loss.make_value_estimator(gamma=0.98)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=128, prefetch=2)

    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.Trainer(
            collector=collector,
            total_frames=FRAMES,
            frame_skip=1,
            loss_module=loss,
            optimizer=torch.optim.Adam(loss.parameters(), 1e-3),
            optim_steps_per_batch=25,
            clip_norm=10.0,
            logger=CSVLogger(exp_name="dqn", log_dir=folder),
            log_interval=1_000,
            progress_bar=False,
            save_trainer_file=str(Path(folder) / "trainer.pt"),
            save_trainer_interval=4_000,
        )
        trainers.ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
        trainer.register_op("post_optim", SoftUpdate(loss, eps=0.98).step)
        trainer.register_op("post_steps", lambda: greedy.step(BATCH))
        LogReward(("next", "reward"), logname="r_training").register(trainer)
        trainers.CountFramesLog(frame_skip=1).register(trainer)
        Recorder(
            record_interval=20,
            record_frames=200,
            policy_exploration=explore,
            environment=make_env(),
            exploration_type=ExplorationType.DETERMINISTIC,
        ).register(trainer)
        trainers.UpdateWeights(collector, 1).register(trainer)
        trainer.train()
        saved = torch.load(Path(folder) / "trainer.pt", weights_only=False)
    assert trainer.collected_frames == FRAMES and {"collector", "replay_buffer"} <= set(saved)

    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        env.set_seed(5)
        returns = [env.rollout(200, actor)["next", "episode_reward"][-1].item() for _ in range(5)]
    print(f"return {sum(returns) / len(returns):.1f}")


if __name__ == "__main__":
    main()
