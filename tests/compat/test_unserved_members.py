"""Access to a member that only other releases have raises an error that names a replacement."""

from __future__ import annotations

import re
from functools import partial
from inspect import getattr_static

import gymnasium
import pytest

import gleanrl.collectors
import gleanrl.data
import gleanrl.envs
from gleanrl.compat import unserved
from gleanrl.compat.unserved import (
    UNSERVED_MEMBERS,
    TellingModule,
    UnservedMembers,
    _Unserved,
    refuse_members,
)
from gleanrl.data import (
    Composite,
    DensifyReward,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Unbounded,
)
from gleanrl.envs import (
    CatFrames,
    EnvBase,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    PendulumEnv,
    SerialEnv,
    SqueezeTransform,
    TensorDictPrimer,
    TicTacToeEnv,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from gleanrl.errors import UnservedMemberError

PUBLIC = {
    name: cls
    for module in (gleanrl.collectors, gleanrl.data, gleanrl.envs)
    for name, cls in vars(module).items()
}


@pytest.mark.parametrize("row", UNSERVED_MEMBERS, ids=lambda row: f"{row.owner}-{row.names.split()[0]}")
def test_rows_list_absent_members_of_public_classes(row):
    for name in row.names.split():
        if "(" not in name:
            assert not hasattr(PUBLIC[row.owner], name), name


ENVIRONMENTS = (
    PendulumEnv,
    TicTacToeEnv,
    partial(GymEnv, "CartPole-v1"),
    lambda: GymWrapper(gymnasium.make("CartPole-v1")),
    lambda: TransformedEnv(PendulumEnv(), CatFrames(2, -1, in_keys=["th"])),
    lambda: SerialEnv(2, PendulumEnv),
    pytest.param(lambda: ParallelEnv(1, PendulumEnv), id="ParallelEnv"),
)
TRANSFORMS = (
    lambda: CatFrames(2, -1, in_keys=["th"]),
    DensifyReward,
    lambda: TensorDictPrimer(Composite(state=Unbounded((3,)))),
    lambda: UnsqueezeTransform(-1, in_keys=["th"]),
    lambda: SqueezeTransform(-1, in_keys=["th"]),
    lambda: VecNorm(["th"]),
    lambda: VecNormV2(["th"]),
)


@pytest.mark.parametrize("make", (*ENVIRONMENTS, *TRANSFORMS))
def test_instances_of_torch_modules_name_a_replacement(make):
    subject = make()
    owners = {base.__name__ for base in type(subject).__mro__}
    rows = {
        name: row.why
        for row in UNSERVED_MEMBERS
        if row.owner in owners
        for name in row.names.split()
        if "(" not in name and isinstance(getattr_static(subject, name), _Unserved)
    }
    assert rows
    for name, why in rows.items():
        with pytest.raises(UnservedMemberError, match=rf"\.{name} isn't served: {re.escape(why)}"):
            getattr(subject, name)
    with pytest.raises(AttributeError) as caught:
        _ = subject.nothing_of_that_name
    assert not isinstance(caught.value, UnservedMemberError)
    if isinstance(subject, EnvBase):
        subject.close()


def test_access_to_an_unserved_member_names_a_replacement():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    with pytest.raises(
        UnservedMemberError, match=r"^ReplayBuffer\.read_all_in_order isn't served: read rb\[:end\]"
    ):
        buffer.read_all_in_order()
    with pytest.raises(AttributeError, match="counts the generation of every slot"):
        RoundRobinWriter().generations_of(0)
    assert not hasattr(buffer, "query") and getattr(buffer, "query", None) is None


def test_members_defined_or_assigned_by_users_are_used():
    class Mine(ReplayBuffer):
        def query(self) -> int:
            return 3

    buffer = Mine(storage=LazyTensorStorage(3))
    buffer.client = 4
    assert (buffer.query(), buffer.client) == (3, 4)


def test_members_of_a_users_second_base_class_are_used():
    class Theirs:
        query = 3

        def start(self) -> int:
            return 4

        @property
        def client(self) -> int:
            return 5

    class Mine(ReplayBuffer, Theirs):
        pass

    buffer = Mine(storage=LazyTensorStorage(3))
    assert (buffer.query, buffer.start(), buffer.client) == (3, 4, 5)
    with pytest.raises(UnservedMemberError, match="Mine.shutdown"):
        buffer.shutdown()


def test_classes_of_other_libraries_are_not_changed(monkeypatch):
    monkeypatch.setattr(unserved, "UNSERVED_MEMBERS", (UnservedMembers("Theirs", "thing", "no"),))
    theirs, ours = (
        type("Theirs", (), {"__module__": module}) for module in ("elsewhere", "gleanrl.elsewhere")
    )
    for cls in (theirs, ours, len):
        refuse_members(cls)
    assert "thing" not in vars(theirs) and "thing" in vars(ours)


class Asking(TellingModule):
    """Has a property that raises, and a fallback `__getattr__`."""

    @property
    def broken(self):
        return self.nothing

    @property
    def outer(self):
        return self._inner

    @property
    def _inner(self):
        return [].missing

    def _elsewhere(self, name):
        return "elsewhere" if name in ("broken", "outer") else super()._elsewhere(name)


@pytest.mark.parametrize(
    ("name", "cause"), [("broken", "'nothing'"), ("outer", "'missing'"), ("_inner", "'missing'")]
)
def test_attribute_error_inside_a_property_is_raised_unchanged(name, cause):
    with pytest.raises(AttributeError, match=cause):
        getattr(Asking(), name)
