"""`EntryTransform`: entries mapped one by one, and their specs with them."""

from __future__ import annotations

from typing import Any, ClassVar

from gleanrl.data.specs import Composite, TensorSpec
from gleanrl.envs.transforms.base import Transform
from gleanrl.envs.transforms.spec_tools import map_leaves, mapped


class EntryTransform(Transform):
    """Maps each of `in_keys` by `_apply_transform`, and its spec, wherever it is declared, by `_leaf`.

    With `maps_inputs` the specs of actions and states in `in_keys_inv` are mapped as well, to the user's side.
    """

    on_rows = True
    maps_inputs: ClassVar[bool] = False

    def _leaf(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of what `_apply_transform` makes of values of `spec`; by default it maps bounds to bounds."""
        return mapped(spec, self._apply_transform, monotone=True)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Map the specs of those `in_keys` that are observations."""
        return map_leaves(observation_spec, self.pairs(), self._leaf)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Map the specs of those `in_keys` that are rewards."""
        return map_leaves(reward_spec, self.pairs(), self._leaf)

    def transform_action_spec(self, action_spec: Any) -> Any:
        """Map the specs of those `in_keys_inv` that are actions."""
        return map_leaves(action_spec, self.pairs_inv(), self._leaf) if self.maps_inputs else action_spec

    def transform_state_spec(self, state_spec: Any) -> Any:
        """Map the specs of those `in_keys_inv` that are states."""
        return map_leaves(state_spec, self.pairs_inv(), self._leaf) if self.maps_inputs else state_spec
