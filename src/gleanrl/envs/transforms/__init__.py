"""Transforms: what stands between an environment, or a replay buffer, and its user."""

from gleanrl.compat import bind
from gleanrl.envs.transforms.actions import ActionDiscretizer, ActionMask, DiscreteActionProjection
from gleanrl.envs.transforms.auto_reset import AutoResetEnv, AutoResetTransform, VecGymEnvTransform
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.batch_size import BatchSizeTransform
from gleanrl.envs.transforms.buffers import BurnInTransform, RandomCropTensorDict, Reward2GoTransform
from gleanrl.envs.transforms.casting import (
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    PinMemoryTransform,
)
from gleanrl.envs.transforms.checks import FiniteTensorDictCheck
from gleanrl.envs.transforms.compose import Compose
from gleanrl.envs.transforms.control import EndOfLifeTransform, FrameSkipTransform, NoopResetEnv, TimeMaxPool
from gleanrl.envs.transforms.env import TransformedEnv
from gleanrl.envs.transforms.episodes import InitTracker, StepCounter
from gleanrl.envs.transforms.foreign import ForeignTransform
from gleanrl.envs.transforms.frames import CatFrames
from gleanrl.envs.transforms.functions import Hash, UnaryTransform
from gleanrl.envs.transforms.macro import MultiAction
from gleanrl.envs.transforms.measuring import Timer, TrajCounter
from gleanrl.envs.transforms.multi_step import MultiStepTransform
from gleanrl.envs.transforms.normalization import ObservationNorm
from gleanrl.envs.transforms.pixels import CenterCrop, Crop, GrayScale, Resize, ToTensorImage
from gleanrl.envs.transforms.primer import TensorDictPrimer
from gleanrl.envs.transforms.returns import RewardSum, TargetReturn
from gleanrl.envs.transforms.rewards import (
    BinarizeReward,
    ClipTransform,
    LineariseRewards,
    RewardClipping,
    RewardScaling,
    SignTransform,
)
from gleanrl.envs.transforms.shapes import (
    CatTensors,
    FlattenObservation,
    PermuteTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from gleanrl.envs.transforms.stacking import Stack
from gleanrl.envs.transforms.structure import (
    ExcludeTransform,
    RemoveEmptySpecs,
    RenameTransform,
    SelectTransform,
)
from gleanrl.envs.transforms.switching import ConditionalPolicySwitch, ConditionalSkip
from gleanrl.envs.transforms.vec_norm import VecNorm
from gleanrl.envs.transforms.vec_norm_v2 import VecNormV2

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
