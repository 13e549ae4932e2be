"""Transforms: they change the data between an environment, or a replay buffer, and its user."""

from gleanrl.compat import bind
from gleanrl.envs.transforms.actions import (
    ActionDiscretizer,
    ActionMask,
    DiscreteActionProjection,
    MultiAction,
)
from gleanrl.envs.transforms.auto_reset import AutoResetEnv, AutoResetTransform, VecGymEnvTransform
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.casting import (
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    FiniteTensorDictCheck,
    PinMemoryTransform,
)
from gleanrl.envs.transforms.compose import Compose
from gleanrl.envs.transforms.control import (
    ConditionalPolicySwitch,
    ConditionalSkip,
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    TimeMaxPool,
)
from gleanrl.envs.transforms.functions import Hash, UnaryTransform
from gleanrl.envs.transforms.images import CatFrames, CenterCrop, Crop, GrayScale, Resize, ToTensorImage
from gleanrl.envs.transforms.keys import ExcludeTransform, RemoveEmptySpecs, RenameTransform, SelectTransform
from gleanrl.envs.transforms.normalization import ObservationNorm
from gleanrl.envs.transforms.primer import TensorDictPrimer
from gleanrl.envs.transforms.replay import (
    BurnInTransform,
    MultiStepTransform,
    RandomCropTensorDict,
    Reward2GoTransform,
)
from gleanrl.envs.transforms.rewards import (
    BinarizeReward,
    ClipTransform,
    LineariseRewards,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    TargetReturn,
)
from gleanrl.envs.transforms.shapes import (
    BatchSizeTransform,
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    Stack,
    UnsqueezeTransform,
)
from gleanrl.envs.transforms.step_counters import InitTracker, StepCounter, Timer, TrajCounter
from gleanrl.envs.transforms.torchrl import ForeignTransform
from gleanrl.envs.transforms.transformed_env import TransformedEnv
from gleanrl.envs.transforms.vec_norm import VecNorm, VecNormV2

__all__ = [
    "ActionDiscretizer",
    "ActionMask",
    "AutoResetEnv",
    "AutoResetTransform",
    "BatchSizeTransform",
    "BinarizeReward",
    "BurnInTransform",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "ConditionalPolicySwitch",
    "ConditionalSkip",
    "Crop",
    "DTypeCastTransform",
    "DeviceCastTransform",
    "DiscreteActionProjection",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "ExcludeTransform",
    "FiniteTensorDictCheck",
    "FlattenObservation",
    "ForeignTransform",
    "FrameSkipTransform",
    "GrayScale",
    "Hash",
    "InitTracker",
    "LineariseRewards",
    "MultiAction",
    "MultiStepTransform",
    "NoopResetEnv",
    "ObservationNorm",
    "PermuteTransform",
    "PinMemoryTransform",
    "RandomCropTensorDict",
    "RemoveEmptySpecs",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "SqueezeTransform",
    "Stack",
    "StepCounter",
    "TargetReturn",
    "TensorDictPrimer",
    "TimeMaxPool",
    "Timer",
    "ToTensorImage",
    "TrajCounter",
    "Transform",
    "TransformedEnv",
    "UnaryTransform",
    "UnsqueezeTransform",
    "VecGymEnvTransform",
    "VecNorm",
    "VecNormV2",
]

bind(__name__, globals())
